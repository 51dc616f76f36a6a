// The page: what is asked, which runs are shown, and what is kept.

import { Composer } from "./composer.js";
import { ConversationView, Tree, newId, noteOf } from "./conversation.js";
import { byId, download, el, fill } from "./dom.js";
import { fromFile, toHtml, toJson } from "./export.js";
import { summarize } from "./figures.js";
import { RunView, comparisonTable } from "./inspector.js";
import { LoadView } from "./load.js";
import { Run, replay } from "./run.js";
import { Recorder, Store } from "./store.js";
import { ServerError, ask, get, setKey } from "./stream.js";
import { short } from "./text.js";

/**
 * @typedef {import("./store.js").Turn} Turn
 * @typedef {import("./run.js").RunRecord} RunRecord
 */

const CONVERSATION = "forethought.conversation";
const THEME = "forethought.theme";

const store = new Store();
/** @type {Map<string, Run>} runs that are loaded */
const runs = new Map();
/** @type {RunView[]} the runs that are shown: one, or two that are compared */
let views = [];
let tree = new Tree();
/** @type {AbortController | null} of the current run */
let active = null;
let frameAsked = false;
/** Whether the page is being left: what fails then fails because of that. */
let isLeaving = false;

const composer = new Composer((question) => {
  const path = tree.path;
  composer.question.value = "";
  begin(tree.add(path.length ? path[path.length - 1].id : null, question));
});

const conversation = new ConversationView(runOf, {
  edit: (turn, question) => begin(tree.add(turn.parent, question)),
  again: (turn) => begin(turn),
  show: (turn) => {
    const run = runOf(turn);
    if (run) inspect(run);
    byId("inspector").scrollIntoView({ block: "start" });
  },
  changed: () => {
    keepConversation();
    conversation.render(tree);
    loadShown().then(showLast);
  },
});

/** The run that is shown of a turn: the last one. @param {Turn} turn @returns {Run | null} */
function runOf(turn) {
  return runs.get(turn.runs[turn.runs.length - 1]) ?? null;
}

/** The plain run that was made to compare with a run. @param {Run} run */
function plainOf(run) {
  return [...runs.values()].findLast((each) => each.record.plainOf === run.id) ?? null;
}

/** @param {string} text */
function say(text) {
  byId("status").textContent = text;
}

// ---- asking ------------------------------------------------------------------------------------

/** Asks the question of a turn with the present settings. @param {Turn} turn */
async function begin(turn) {
  if (active) {
    say("A run is in progress. Stop it first.");
    return;
  }
  const request = composer.request(tree.messages(turn, runOf));
  const run = newRun({ request, conversation: tree.conversation.id, turn: turn.id });
  turn.runs.push(run.id);
  keepConversation();
  conversation.render(tree);
  inspect(run);
  const plainToo = composer.plainToo && run.method !== "plain";
  await follow(run);
  if (plainToo && run.status === "done") await runPlain(run);
}

/** Asks the same with plain decoding, and compares. @param {Run} run */
async function runPlain(run) {
  if (active) {
    say("A run is in progress. Stop it first.");
    return;
  }
  const { method_params, budget, ...request } = run.record.request;
  const plain = newRun({
    request: { ...request, method: "plain", speculation: { enabled: false } },
    conversation: run.record.conversation,
    plainOf: run.id,
  });
  compare(run, plain);
  await follow(plain);
  compare(run, plain);
}

/** @param {Omit<RunRecord, "id" | "created">} record */
function newRun(record) {
  const run = new Run({ id: newId(), created: Date.now(), status: "running", ...record });
  runs.set(run.id, run);
  store.saveRun(run.record).catch(storeFailed);
  return run;
}

/** Sends the request of a run and takes in its events until it is over. @param {Run} run */
async function follow(run) {
  const recorder = new Recorder(store, run.id);
  const control = (active = new AbortController());
  const began = performance.now();
  isLeaving = false;
  const take = (/** @type {any} */ event) => {
    event.at ??= Math.round(performance.now() - began) / 1000;
    run.apply(event);
    recorder.add(event);
    draw();
  };
  setBusy(true);
  say(`Asked with ${run.method}.`);
  try {
    const body = { ...run.record.request, stream: true, stream_options: { include_usage: true }, events: true };
    await ask(body, control.signal, take);
    if (!run.isOver) take({ type: "finished" });
  } catch (error) {
    if (control.signal.aborted) take({ type: "stopped" });
    else if (!run.isOver && !isLeaving) take({ type: "error", message: described(error) });
    if (error instanceof ServerError && error.status === 401) askForKey();
  } finally {
    active = null;
    setBusy(false);
    await recorder.close();
    if (isLeaving && !run.isOver) return; // it is told as interrupted when the page comes back
    run.record = { ...run.record, status: run.status, summary: summarize(run) };
    store.saveRun(run.record).catch(storeFailed);
    redraw();
    say(told(run));
  }
}

/** @param {unknown} error */
function described(error) {
  if (!(error instanceof Error)) return String(error);
  const later = error instanceof ServerError && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  if (error instanceof TypeError) return "The server cannot be reached, or the connection was lost.";
  return error.message + later;
}

/** How a run went, for the live region. @param {Run} run */
function told(run) {
  const starts = { done: "Answered: ", stopped: "Stopped: ", failed: "", interrupted: "", running: "" };
  return starts[run.status] + noteOf(run);
}

/** @param {boolean} isBusy */
function setBusy(isBusy) {
  const [start, stop] = [byId("ask"), byId("stop")];
  const hadFocus = document.activeElement === start || document.activeElement === stop;
  start.hidden = isBusy;
  stop.hidden = !isBusy;
  if (hadFocus) (isBusy ? stop : start).focus();
}

function stop() {
  active?.abort();
}

// ---- showing -----------------------------------------------------------------------------------

/** Draws what has come with the next frame. */
function draw() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(() => {
    frameAsked = false;
    conversation.update();
    for (const view of views) view.update();
  });
}

function redraw() {
  conversation.update();
  for (const view of views) view.against(plainOf(view.run));
}

/** Shows one run. @param {Run} run */
function inspect(run) {
  views = [new RunView(run, actionsOf(run))];
  fill(byId("comparison"));
  fill(byId("views"), views.map((view) => view.element));
  byId("views").classList.remove("two");
  for (const view of views) view.against(plainOf(run));
}

/** Shows two runs beside each other, on one time scale. @param {Run} one @param {Run} other */
function compare(one, other) {
  const range = one.isOver && other.isOver ? Math.max(one.lastAt, other.lastAt) * 1.04 : 0;
  views = [one, other].map((run) => new RunView(run, actionsOf(run), range));
  fill(
    byId("comparison"),
    comparisonTable(one, other),
    el("button", { type: "button", class: "quiet", onclick: () => inspect(one) }, "Close the comparison"),
  );
  fill(byId("views"), views.map((view) => view.element));
  byId("views").classList.add("two");
  for (const view of views) view.against(plainOf(view.run));
}

/** @param {Run} run */
function actionsOf(run) {
  const actions = [
    { label: "Compare with…", onclick: () => showRuns(run) },
    { label: "Save HTML", onclick: () => saveHtml(run) },
    { label: "Save JSON", onclick: () => download(`run-${run.id}.json`, "application/json", toJson(run)) },
  ];
  if (run.record.plainOf) return actions;
  return [{ label: "Run plain too", onclick: () => runPlain(run) }, ...actions];
}

/** @param {Run} run */
function saveHtml(run) {
  const view = views.find((each) => each.run === run);
  const picture = view ? view.timeline.base.toDataURL("image/png") : "";
  download(`run-${run.id}.html`, "text/html", toHtml(run, plainOf(run), picture));
}

function showLast() {
  const shown = tree.path.map(runOf).filter((run) => run !== null);
  if (shown.length) inspect(/** @type {Run} */ (shown[shown.length - 1]));
}

// ---- kept runs ---------------------------------------------------------------------------------

/** @param {unknown} error */
function storeFailed(error) {
  byId("runs-note").textContent = `This browser keeps no runs (${described(error)}): save those that you need as files.`;
}

function keepConversation() {
  store.saveConversation(tree.conversation).catch(storeFailed);
  try {
    localStorage.setItem(CONVERSATION, tree.conversation.id);
  } catch {
    // the conversation lasts as long as the page
  }
}

/** A run that is loaded or kept. @param {string} id @returns {Promise<Run | null>} */
async function loaded(id) {
  const known = runs.get(id);
  if (known) return known;
  const kept = await store.loadRun(id).catch(() => null);
  if (!kept) return null;
  const run = replay(kept.record, kept.events);
  if (!run.isOver) {
    const event = { type: "interrupted", at: run.lastAt };
    run.apply(event);
    run.record = { ...kept.record, status: run.status, summary: summarize(run) };
    await store.saveEvents({ run: id, number: 1e9, events: [event] });
    await store.saveRun(run.record);
  }
  runs.set(id, run);
  return run;
}

/** Loads the runs of the turns that are shown, and those that they were compared with. */
async function loadShown() {
  await Promise.all(tree.path.flatMap((turn) => turn.runs).map(loaded));
  const records = await store.listRuns().catch(() => []);
  const plain = records.filter((record) => record.plainOf && runs.has(record.plainOf));
  await Promise.all(plain.map((record) => loaded(record.id)));
  conversation.render(tree);
}

/** Goes on where the page was left. */
async function restore() {
  await store.recover().catch(() => {});
  const id = localStorage.getItem(CONVERSATION);
  const kept = id && (await store.loadConversation(id).catch(() => null));
  if (!kept) return;
  tree = new Tree(kept);
  await loadShown();
  showLast();
  const last = tree.path.map(runOf).pop();
  if (last?.status === "interrupted") say("The last run was interrupted when the page was left. What came of it is here.");
}

/** The list of kept runs. @param {Run | null} against the run to compare the chosen one with */
async function showRuns(against) {
  fill(byId("run-list"));
  const records = await store.listRuns().catch((error) => (storeFailed(error), []));
  fill(byId("runs-heading"), against ? `Compare ${against.method} with` : "Runs");
  const rows = records.filter((record) => record.id !== against?.id).map((record) => runRow(record, against));
  fill(byId("run-list"), rows.length ? el("ul", { class: "run-list" }, rows) : el("p", { class: "muted" }, "There is none yet."));
  const dialog = byId("runs");
  if (!dialog.open) dialog.showModal();
}

/** @param {RunRecord} record @param {Run | null} against */
function runRow(record, against) {
  const { request, summary } = record;
  const { completionTokens, seconds } = /** @type {any} */ (summary ?? {});
  const question = short(request.messages[request.messages.length - 1].content, 90);
  const size = completionTokens === undefined ? "" : `${completionTokens} tokens, ${seconds.toFixed(2)} s`;
  const about = [request.method ?? "plain", record.status, size, new Date(record.created).toLocaleString()];
  const open = async () => {
    const run = await loaded(record.id);
    if (!run) return;
    byId("runs").close();
    if (against) compare(against, run);
    else await openRun(run);
  };
  const remove = async () => {
    await store.deleteRun(record.id).catch(storeFailed);
    runs.delete(record.id);
    await showRuns(against);
  };
  return el(
    "li",
    {},
    el("button", { type: "button", class: "quiet open", onclick: open }, el("span", { dir: "auto" }, question), el("span", { class: "muted small" }, about.filter(Boolean).join(" · "))),
    el("button", { type: "button", class: "quiet", "aria-label": `Delete the run: ${question}`, onclick: remove }, "Delete"),
  );
}

/** Shows a run, and the conversation that it belongs to. @param {Run} run */
async function openRun(run) {
  const { conversation: id, turn: turnId } = run.record;
  const kept = id === tree.conversation.id ? tree.conversation : id && (await store.loadConversation(id).catch(() => null));
  if (kept && !active) {
    tree = new Tree(kept);
    const turn = kept.turns.find((each) => each.id === turnId);
    if (turn) tree.show(turn);
    keepConversation();
    await loadShown();
  }
  inspect(run);
}

/** @param {File} file */
async function importRun(file) {
  try {
    const read = fromFile(await file.text());
    const run = replay({ ...read.record, id: newId(), conversation: undefined, turn: undefined, plainOf: undefined }, read.events);
    run.record = { ...run.record, status: run.status, summary: summarize(run) };
    runs.set(run.id, run);
    await store.saveRun(run.record);
    await store.saveEvents({ run: run.id, number: 0, events: run.events });
    byId("runs").close();
    inspect(run);
    say(`Imported: ${noteOf(run)}`);
  } catch (error) {
    byId("runs-note").textContent = described(error);
  }
}

// ---- the page ----------------------------------------------------------------------------------

function askForKey() {
  const dialog = byId("key");
  if (!dialog.open) dialog.showModal();
}

async function offer() {
  try {
    const [models, methods, drafters, examples] = await Promise.all(
      ["v1/models", "v1/methods", "v1/drafters", "v1/examples"].map((path) => get(path)),
    );
    composer.offer(models.data, methods.data, drafters.data, examples.data);
    byId("model").textContent = composer.model;
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) askForKey();
    say(described(error));
  }
}

/** @param {string} theme "auto", "light" or "dark" */
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  for (const view of views) view.timeline.refresh();
}

function nextTheme() {
  const themes = ["auto", "light", "dark"];
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % themes.length];
  localStorage.setItem(THEME, theme);
  setTheme(theme);
}

addEventListener("beforeunload", () => {
  isLeaving = true;
});
byId("stop").addEventListener("click", stop);
byId("theme").addEventListener("click", nextTheme);
byId("open-runs").addEventListener("click", () => showRuns(null));
byId("close-runs").addEventListener("click", () => byId("runs").close());
byId("new").addEventListener("click", () => {
  if (active) return say("A run is in progress. Stop it first.");
  tree = new Tree();
  localStorage.removeItem(CONVERSATION);
  conversation.render(tree);
  views = [];
  fill(byId("views"));
  fill(byId("comparison"));
  say("");
  composer.question.focus();
});
byId("import").addEventListener("change", (/** @type {Event} */ event) => {
  const input = /** @type {HTMLInputElement} */ (event.target);
  if (input.files?.length) importRun(input.files[0]);
  input.value = "";
});
byId("key").addEventListener("close", () => {
  setKey(byId("key-value").value);
  offer();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && active && !document.querySelector("dialog[open]")) stop();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const view of views) view.timeline.refresh();
});
setTheme(localStorage.getItem(THEME) ?? "auto");
await Promise.all([offer(), restore()]);
new LoadView();
document.documentElement.dataset.ready = "true";
