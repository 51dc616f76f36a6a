// The page: what is asked, which runs are shown, and what is kept.

import { Composer, drafterLine } from "./composer.js";
import { ContextMeter } from "./context.js";
import { ConversationView, Tree, noteOf } from "./conversation.js";
import { byId, download, el, fill } from "./dom.js";
import { toHtml, toJson } from "./export.js";
import { RunView, comparison } from "./inspector.js";
import { Library } from "./library.js";
import { ChatList, RunList, titleOf } from "./lists.js";
import { LoadView } from "./load.js";
import { Recorder, alone } from "./store.js";
import { LEFT, ServerError, ask, get, setKey } from "./stream.js";
import { MAX_ROUNDS, messagesOf, runCalls } from "./tools.js";
import { Welcome } from "./welcome.js";

/**
 * @typedef {import("./store.js").Turn} Turn
 * @typedef {import("./store.js").Conversation} Conversation
 * @typedef {import("./run.js").Run} Run
 */

const CONVERSATION = "forethought.conversation";
const THEME = "forethought.theme";
/** Milliseconds between two looks at the clock of a run from which nothing comes. */
const TICK = 500;

const library = new Library((error) => {
  const note = `This browser keeps nothing (${described(error)}): save what you need as files.`;
  for (const id of ["runs-note", "chats-note"]) byId(id).textContent = note;
});
/** @type {RunView[]} the runs that are shown: one, or two that are compared */
let views = [];
let tree = new Tree();
/** @type {AbortController | null} of the current run */
let active = null;
/** Done once the last run that was followed no longer is. */
let following = Promise.resolve();
let frameAsked = false;
/** Whether the page is being left: what fails then fails because of that. */
let isLeaving = false;

const composer = new Composer(
  (question, files) => {
    const path = tree.path;
    return ifIdle(() => begin(tree.add(path.length ? path[path.length - 1].id : null, question, files.length ? { files } : {})));
  },
  (settings) => {
    tree.conversation.settings = settings;
    if (tree.conversation.turns.length) keepConversation();
  },
  say,
);

const meter = new ContextMeter(() => {
  const { messages, model, tools = [] } = composer.request([...tree.allMessages((turn) => library.runOf(turn)), ...composer.written]);
  return { model, messages, tools: /** @type {any} */ (tools) };
});

const welcome = new Welcome({
  take: (example) => composer.take(example),
  refuse: say,
  choose: (method) => {
    composer.chooseMethod(method.name);
    composer.question.focus();
  },
});

const conversation = new ConversationView(
  (turn) => library.runOf(turn),
  {
    edit: (turn, question) => ifIdle(() => begin(tree.add(turn.parent, question, { files: turn.files }))),
    again: (turn) => ifIdle(() => begin(library.runOf(turn)?.answer ? tree.add(turn.parent, turn.question, { files: turn.files, begun: turn.begun }) : turn)),
    rewrite: (turn, answer, goesOn) => ifIdle(() => rewrite(turn, answer, goesOn)),
    fork: (turn) => ifIdle(() => void fork(turn)),
    remove: (turn) => ifIdle(() => void removeTurn(turn)),
    show: (turn) => {
      const run = library.runOf(turn);
      if (run) inspect(run);
      byId("inspector").scrollIntoView({ block: "start" });
    },
    changed: () => {
      keepConversation();
      conversation.render(tree);
      loadShown().then(showLast);
    },
  },
  welcome.element,
);

const chatList = new ChatList(library, {
  shown: () => tree.conversation.id,
  open: async (chat) => openChat((await library.store.loadConversation(chat.id).catch(() => null)) ?? chat),
  rename: async (chat, title) => {
    if (chat.id !== tree.conversation.id) return library.rename(chat, title);
    tree.conversation.title = title;
    await keepConversation();
  },
  leave: async (chat) => {
    if (chat.id === tree.conversation.id) newChat();
    await following;
  },
});

const runList = new RunList(library, {
  open: openRun,
  compare,
  imported: (run) => {
    inspect(run);
    say(`Imported: ${noteOf(run)}`);
  },
});

/** @param {string} text */
function say(text) {
  byId("status").textContent = text;
}

// ---- asking ------------------------------------------------------------------------------------

/** Does something unless a run is in progress. @param {() => void} action @returns {boolean} whether it was done */
function ifIdle(action) {
  if (active) say("A run is in progress. Stop it first.");
  else {
    action();
    return true;
  }
  return false;
}

/** Puts an answer that was written or edited beside that of a turn. @param {Turn} turn @param {string} answer @param {boolean} goesOn whether the model continues it */
function rewrite(turn, answer, goesOn) {
  const written = tree.add(turn.parent, turn.question, { files: turn.files, begun: answer });
  if (goesOn) return void begin(written);
  keepConversation(true);
  conversation.render(tree);
}

/** Begins a chat with the turns up to this one; the chat that was shown stays as it is. @param {Turn} turn */
async function fork(turn) {
  const { conversation: chat } = tree;
  const title = `Fork of ${titleOf(chat).replace(/^Fork of /, "")}`;
  await openChat(await library.fork(chat, tree.upTo(turn.id), title));
  say("This is a new chat, up to that answer. The one it was forked from stays as it is.");
  composer.question.focus();
}

/** Deletes a turn with its runs, and those below it. @param {Turn} turn */
async function removeTurn(turn) {
  const removed = tree.remove(turn);
  for (const id of removed.flatMap((each) => each.runs)) await library.deleteRun(id);
  if (!tree.conversation.turns.length) {
    await library.deleteChat(tree.conversation);
    chatList.put(tree.conversation);
    return newChat();
  }
  keepConversation();
  clearViews();
  await loadShown();
  showLast();
}

/** Answers the question of a turn with the present settings. @param {Turn} turn */
async function begin(turn) {
  const request = composer.request(tree.messages(turn, (each) => library.runOf(each)));
  if (turn.begun !== undefined) request.continue_final_message = true;
  tree.conversation.settings = composer.settings;
  const run = library.begin({ request, conversation: tree.conversation.id, turn: turn.id, begun: turn.begun });
  turn.runs.push(run.id);
  keepConversation(true);
  conversation.render(tree);
  meter.changed();
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
  const plain = library.begin({
    request: { ...request, method: "plain", speculation: { enabled: false } },
    conversation: run.record.conversation,
    begun: run.record.begun,
    plainOf: run.id,
  });
  compare(run, plain);
  await follow(plain);
  if (views.some((view) => view.run === plain)) compare(run, plain);
}

/** Takes in the events of a run until it is over, or until another one is. @param {Run} run that begins, or goes on */
async function follow(run) {
  const control = (active = new AbortController());
  setBusy(true);
  following = alone(run.id, (isAlone) => followed(run, control, new Recorder(isAlone ? library.store : null, run.id)));
  await following;
}

/** @param {Run} run @param {AbortController} control @param {Recorder} recorder */
async function followed(run, control, recorder) {
  const passed = run.events.length ? Math.max(0, Date.now() - run.record.created) : 0;
  const began = performance.now() - passed;
  run.clock = () => (performance.now() - began) / 1000;
  const ticking = setInterval(draw, TICK);
  isLeaving = false;
  const take = (/** @type {any} */ event) => {
    if (isLeaving) throw new Error("The page is left."); // what comes now is read after a reload
    event.at ??= Math.round(performance.now() - began) / 1000;
    run.apply(event);
    recorder.add(event);
    draw();
  };
  say(run.events.length ? `The run with ${run.method} goes on.` : `Asked with ${run.method}.`);
  try {
    await answer(run, control.signal, take);
    if (!run.isOver) take({ type: "finished" });
  } catch (error) {
    const isLeft = control.signal.reason === LEFT;
    if (isLeft && !run.goesOn) take({ type: "interrupted" });
    else if (control.signal.aborted && !isLeft) take({ type: "stopped" });
    else if (!isLeft && !run.isOver && !isLeaving) take({ type: "error", message: described(error) });
    if (error instanceof ServerError && error.status === 401) askForKey();
  } finally {
    run.clock = null;
    clearInterval(ticking);
    await recorder.close();
    if (run.isOver) await library.keep(run);
    if (active === control) {
      active = null;
      setBusy(false);
      redraw();
      if (run.isOver) say(told(run));
    }
  }
}

/**
 * Asks, runs the tools that the model calls, and asks again with their results, until it calls none.
 * @param {Run} run
 * @param {AbortSignal} signal
 * @param {(event: any) => void} take gets the events, of all rounds on one clock and in one sum
 */
async function answer(run, signal, take) {
  for (;;) {
    /** @type {any} */
    let last = null;
    await ask(requestOf(run), run.place, signal, (event) => {
      if (event.at !== undefined) event.at += run.roundAt;
      if (event.usage) event.usage = summed(event.usage, run.spent);
      if (event.type === "finished") event.seconds = run.roundAt + (event.seconds ?? 0);
      if (event.type === "finished" && run.pending.length) last = event;
      else take(event);
    });
    if (!run.pending.length || run.round >= MAX_ROUNDS) return last && take(last);
    await runCalls(run.pending, signal, take);
    take({ type: "round", spent: run.usage ?? run.spent });
  }
}

/** What is asked in the present round: the calls of earlier ones, with their results, follow the messages. @param {Run} run */
function requestOf({ record: { request }, round, said, calls }) {
  if (!round) return request;
  const { continue_final_message, tools, ...fields } = request;
  const rounds = said.flatMap((text, number) => messagesOf(text, calls.filter((call) => call.round === number)));
  return { ...fields, messages: [...request.messages, ...rounds], tools: round < MAX_ROUNDS ? tools : undefined };
}

/** @param {any} usage @param {{prompt_tokens: number, completion_tokens: number}} spent in earlier rounds */
function summed(usage, spent) {
  if (!usage) return usage;
  return { ...usage, prompt_tokens: usage.prompt_tokens + spent.prompt_tokens, completion_tokens: usage.completion_tokens + spent.completion_tokens };
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
    const [run] = views.map((view) => view.run).filter((each) => !each.isOver && each.branches.size <= 1);
    if (run) meter.grow(run.branches.get("")?.numTokens ?? 0);
    for (const view of views) view.update();
  });
}

function redraw() {
  conversation.update();
  meter.changed();
  for (const view of views) view.against(library.plainOf(view.run));
}

/** Shows one run. @param {Run} run */
function inspect(run) {
  views = [new RunView(run, actionsOf(run))];
  byId("no-run").hidden = true;
  fill(byId("comparison"));
  fill(byId("views"), views.map((view) => view.element));
  byId("views").classList.remove("two");
  for (const view of views) view.against(library.plainOf(run));
}

/** Shows two runs beside each other, on one time scale. @param {Run} one @param {Run} other */
function compare(one, other) {
  const range = one.isOver && other.isOver ? Math.max(one.lastAt, other.lastAt) * 1.04 : 0;
  views = [one, other].map((run) => new RunView(run, actionsOf(run), range));
  byId("no-run").hidden = true;
  fill(
    byId("comparison"),
    comparison(one, other),
    el("button", { type: "button", class: "quiet", onclick: () => inspect(one) }, "Close the comparison"),
  );
  fill(byId("views"), views.map((view) => view.element));
  byId("views").classList.add("two");
  for (const view of views) view.against(library.plainOf(view.run));
}

/** @param {Run} run */
function actionsOf(run) {
  const actions = [
    { label: "Compare with…", onclick: () => runList.show(run) },
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
  download(`run-${run.id}.html`, "text/html", toHtml(run, library.plainOf(run), picture));
}

function showLast() {
  const shown = tree.path.map((turn) => library.runOf(turn)).filter((run) => run !== null);
  if (shown.length) inspect(/** @type {Run} */ (shown[shown.length - 1]));
}

// ---- what is kept ------------------------------------------------------------------------------

/** @param {boolean} [isUsed] whether the chat comes first in the list now */
async function keepConversation(isUsed = false) {
  const chat = tree.conversation;
  try {
    localStorage.setItem(CONVERSATION, chat.id);
  } catch {
    // the conversation lasts as long as the page
  }
  await library.store.saveConversation(chat, isUsed).catch(library.onFailure);
  chatList.put(chat);
}

/** Loads the runs of the turns that are shown, and follows the one that goes on. */
async function loadShown() {
  await library.loadTurns(tree.path);
  conversation.render(tree);
  meter.changed();
  const runs = tree.path.map((turn) => library.runOf(turn));
  const [run] = [...runs, ...runs.map((each) => each && library.plainOf(each))].filter((each) => each?.goesOn);
  if (run && !active) void follow(run);
}

/** Leaves the run that is followed: it goes on on the server. */
function leave() {
  active?.abort(LEFT);
  active = null;
  setBusy(false);
}

/** Goes on where the page was left. */
async function restore() {
  await library.store.recover().catch(() => {});
  const id = localStorage.getItem(CONVERSATION);
  const kept = id && (await library.store.loadConversation(id).catch(() => null));
  if (!kept) return conversation.render(tree);
  await openChat(kept);
  const last = tree.path.map((turn) => library.runOf(turn)).pop();
  if (last?.status === "interrupted") say("The last run was interrupted when the page was left. What came of it is here.");
}

/** @param {Conversation} chat @param {string} [turnId] of the turn to show */
async function openChat(chat, turnId) {
  leave();
  await following;
  say("");
  tree = new Tree(chat);
  const turn = chat.turns.find((each) => each.id === turnId);
  if (turn) tree.show(turn);
  if (chat.settings) composer.enter(chat.settings);
  keepConversation();
  clearViews();
  await loadShown();
  showLast();
}

/** Begins an empty chat. */
function newChat() {
  leave();
  tree = new Tree();
  localStorage.removeItem(CONVERSATION);
  conversation.render(tree);
  meter.changed();
  clearViews();
  scrollTo(0, 0);
  say("");
  chatList.refresh();
  composer.question.focus();
}

function clearViews() {
  views = [];
  byId("no-run").hidden = false;
  fill(byId("views"));
  fill(byId("comparison"));
}

/** Shows a run, and the conversation that it belongs to. @param {Run} run */
async function openRun(run) {
  const { conversation: id, turn } = run.record;
  const kept = id === tree.conversation.id ? tree.conversation : id && (await library.store.loadConversation(id).catch(() => null));
  if (kept && !run.clock) await openChat(kept, turn);
  inspect(run);
}

// ---- the page ----------------------------------------------------------------------------------

function askForKey() {
  const dialog = byId("key");
  if (!dialog.open) dialog.showModal();
}

async function offer() {
  try {
    const [models, methods, drafters, examples, sampling, tools] = await Promise.all(
      ["v1/models", "v1/methods", "v1/drafters", "v1/examples", "v1/sampling", "v1/tools"].map((path) => get(path)),
    );
    composer.offer(models.data, methods.data, drafters.data, sampling.data, tools.data);
    welcome.offer(models.data, methods.data, examples.data, drafterLine(drafters.data));
    byId("model").textContent = composer.model;
    meter.offer(models.data);
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) askForKey();
    say(described(error));
    welcome.fail(described(error));
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

/** Keys that work everywhere; help in index.html lists them. @param {KeyboardEvent} event */
function onKey(event) {
  const isOpen = document.querySelector("dialog[open]") !== null;
  const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select");
  const isCommand = event.ctrlKey || event.metaKey;
  if (isOpen || event.isComposing) return;
  if (event.key === "Escape") return active ? stop() : undefined;
  if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") newChat();
  else if (isCommand && !event.shiftKey && event.key === "k") chatList.side.find();
  else if (!isTyping && !isCommand && event.key === "/") composer.question.focus();
  else if (!isTyping && !isCommand && event.key === "?") byId("help").showModal();
  else return;
  event.preventDefault();
}

addEventListener("beforeunload", () => {
  isLeaving = true;
});
byId("stop").addEventListener("click", stop);
composer.form.addEventListener("input", () => meter.changed());
byId("theme").addEventListener("click", nextTheme);
byId("open-runs").addEventListener("click", () => runList.show(null));
byId("open-help").addEventListener("click", () => byId("help").showModal());
byId("new").addEventListener("click", newChat);
for (const button of document.querySelectorAll("dialog .close")) button.addEventListener("click", () => button.closest("dialog")?.close());
byId("key").addEventListener("close", () => {
  setKey(byId("key-value").value);
  offer();
});
document.addEventListener("keydown", onKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const view of views) view.timeline.refresh();
});
const legend = byId("legend").cloneNode(true);
legend.removeAttribute("id");
byId("no-run").append(legend);
setTheme(localStorage.getItem(THEME) ?? "auto");
await Promise.all([offer(), restore()]);
new LoadView((isThere) => {
  byId("offline").hidden = isThere;
  if (isThere) void offer().then(redraw);
});
document.documentElement.dataset.ready = "true";
