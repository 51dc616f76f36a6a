// The lists of what the browser keeps: chats, and runs.

import { byId, careful, download, el, fill, quietButton } from "./dom.js";
import { Side } from "./side.js";
import { byUse, lastUse } from "./store.js";
import { short } from "./text.js";

/**
 * @typedef {import("./library.js").Library} Library
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").RunRecord} RunRecord
 * @typedef {import("./store.js").Conversation} Conversation
 */

/** What a chat is called: its title, or its first question. @param {Conversation} chat */
export function titleOf(chat) {
  return short(chat.title ?? "", 200) || short(chat.turns[0]?.question ?? "Empty", 90);
}

/** What a list of chats shows, to compare. @param {Conversation[]} chats */
function stateOf(chats) {
  return JSON.stringify(chats.map((chat) => [chat.id, chat.used, titleOf(chat), chat.turns.length]));
}

/** The time of day, or the day if it is another one. @param {number} time in milliseconds since 1970 */
function timeOf(time) {
  const [then, now] = [new Date(time), new Date()];
  return then.toDateString() === now.toDateString() ? then.toLocaleTimeString([], { timeStyle: "short" }) : then.toLocaleDateString([], { dateStyle: "medium" });
}

/** @param {string} dialog @param {string} input of files @param {(text: string) => Promise<void>} onFile @param {string} note */
function takeFiles(dialog, input, onFile, note) {
  byId(input).addEventListener("change", async (/** @type {Event} */ event) => {
    const field = /** @type {HTMLInputElement} */ (event.target);
    try {
      if (field.files?.length) await onFile(await field.files[0].text());
    } catch (error) {
      byId(note).textContent = error instanceof Error ? error.message : String(error);
    }
    field.value = "";
  });
  byId(dialog).addEventListener("click", (/** @type {Event} */ event) => {
    if (event.target === byId(dialog)) byId(dialog).close(); // beside it
  });
}

/** @param {string} id */
function show(id) {
  const dialog = byId(id);
  if (!dialog.open) dialog.showModal();
}

/** The chats, beside the conversation or in a dialog. */
export class ChatList {
  /**
   * @param {Library} library
   * @param {object} actions
   * @param {() => string} actions.shown the id of the chat that is shown
   * @param {(chat: Conversation) => void} actions.open
   * @param {(chat: Conversation, title: string) => Promise<void>} actions.rename
   * @param {(chat: Conversation) => Promise<void>} actions.leave
   */
  constructor(library, actions) {
    this.library = library;
    this.actions = actions;
    /** @type {Conversation[]} */
    this.chats = [];
    /** @type {Map<string, string[]> | null} of each chat, once they are searched */
    this.answers = null;
    /** The chat whose buttons are unfolded. */
    this.unfolded = "";
    this.filter = byId("chat-filter");
    this.filter.addEventListener("input", () => this.search());
    byId("export-chats").addEventListener("click", () => this.save(this.chats, "chats.json"));
    takeFiles("chats", "import-chats", (text) => this.take(text), "chats-note");
    addEventListener("focus", () => this.isStill && this.catchUp());
    this.side = new Side(() => this.update());
  }

  /** Takes in how a chat is now; one that has no turns is not listed. @param {Conversation} chat */
  put(chat) {
    this.answers = null;
    this.chats = [chat, ...this.chats.filter((other) => other.id !== chat.id)].filter((each) => each.turns.length).sort(byUse);
    this.refresh();
  }

  /** Shows which chat is shown now. */
  refresh() {
    if (this.isStill) this.fill();
  }

  /** @private Whether the list is in sight and no title is written in it. */
  get isStill() {
    return this.side.isOpen && !byId("chat-list").querySelector(".rename");
  }

  /** @private */
  async update() {
    this.chats = await this.library.chats();
    this.answers = null;
    await this.search();
  }

  /** @private Takes in what other tabs did; where they did nothing the rows stay, as one of them may be pressed just now. */
  async catchUp() {
    const chats = await this.library.chats();
    if (stateOf(chats) !== stateOf(this.chats) && this.isStill) await this.update();
  }

  /** @private Lists the chats with the words that are searched. */
  async search() {
    if (this.wanted) this.answers ??= await this.library.answers();
    this.fill();
  }

  /** @private */
  get wanted() {
    return this.filter.value.trim().toLowerCase();
  }

  /** @private @param {Conversation} chat */
  textsOf(chat) {
    const written = chat.turns.flatMap((turn) => [turn.question, turn.begun ?? "", ...(turn.files ?? []).map((file) => file.name)]);
    return [titleOf(chat), ...written, ...(this.answers?.get(chat.id) ?? [])];
  }

  /** @private Fills the list; the focus stays at its chat, or goes to the next one. */
  fill() {
    const list = byId("chat-list");
    const focused = [...list.querySelectorAll("li")].findIndex((row) => row.contains(document.activeElement));
    const id = list.querySelectorAll("li")[focused]?.dataset.chat;
    const { wanted } = this;
    const rows = this.chats.filter((chat) => !wanted || this.textsOf(chat).some((text) => text.toLowerCase().includes(wanted))).map((chat) => this.row(chat));
    const none = wanted ? "No chat has these words." : "There is none yet: a question begins one.";
    fill(list, rows.length ? el("ul", { class: "kept" }, rows) : el("p", { class: "muted" }, none));
    byId("export-chats").disabled = !this.chats.length;
    if (focused < 0) return;
    const row = rows.find((each) => each.dataset.chat === id) ?? rows[Math.min(focused, rows.length - 1)];
    (row?.querySelector("button") ?? this.filter).focus();
  }

  /** @private @param {Conversation} chat */
  row(chat) {
    const title = titleOf(chat);
    const open = () => {
      this.side.choose();
      this.actions.open(chat);
    };
    const remove = async () => {
      await this.actions.leave(chat);
      await this.library.deleteChat(chat);
      await this.update();
    };
    const about = `${chat.turns.length} ${chat.turns.length === 1 ? "question" : "questions"} · ${timeOf(lastUse(chat))}`;
    const current = chat.id === this.actions.shown() ? "true" : null;
    const opener = el("button", { type: "button", class: "quiet open", "aria-current": current, onclick: open }, el("span", { dir: "auto" }, title), el("span", { class: "muted small" }, about));
    const buttons = el(
      "span",
      { class: "buttons" },
      quietButton("Rename", () => this.rename(chat, opener), `Rename the chat: ${title}`),
      quietButton("Export", () => this.save([chat], `chat-${chat.id}.json`), `Export the chat: ${title}`),
      careful("Delete", remove, `Delete the chat: ${title}`),
    );
    return el("li", { "data-chat": chat.id }, opener, this.unfolder(chat, title), buttons);
  }

  /** @private What unfolds the buttons of a chat where the column has no room for them. @param {Conversation} chat @param {string} title */
  unfolder(chat, title) {
    const toggle = () => {
      this.unfolded = this.unfolded === chat.id ? "" : chat.id;
      for (const row of byId("chat-list").querySelectorAll("li")) row.querySelector(".unfold").setAttribute("aria-expanded", String(row.dataset.chat === this.unfolded));
    };
    const isUnfolded = String(this.unfolded === chat.id);
    return el("button", { type: "button", class: "quiet unfold", "aria-expanded": isUnfolded, "aria-label": `Rename, export or delete the chat: ${title}`, onclick: toggle }, "⋯");
  }

  /** @private @param {Conversation} chat @param {HTMLElement} opener in whose place the title is written */
  rename(chat, opener) {
    const input = el("input", { type: "text", value: titleOf(chat), "aria-label": "Title", maxlength: 200 });
    const close = () => {
      form.replaceWith(opener);
      opener.focus();
    };
    const finish = async () => {
      const title = input.value.trim();
      close();
      await this.actions.rename(chat, title);
      await this.update();
    };
    const onKey = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape" || event.isComposing) return;
      event.preventDefault();
      event.stopPropagation(); // it stops no run and closes no dialog
      close();
    };
    const form = el("form", { class: "rename", onkeydown: onKey, onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), finish()) }, input, el("button", { class: "primary" }, "Keep"));
    opener.replaceWith(form);
    input.select();
  }

  /** @private @param {Conversation[]} chats @param {string} name */
  async save(chats, name) {
    download(name, "application/json", await this.library.chatsToJson(chats));
  }

  /** @private @param {string} text of a file */
  async take(text) {
    const chats = await this.library.importChats(text);
    byId("chats-note").textContent = `Imported ${chats.length} ${chats.length === 1 ? "chat" : "chats"}.`;
    await this.update();
  }
}

/** The dialog of runs. */
export class RunList {
  /** @param {Library} library @param {{open: (run: Run) => void, imported: (run: Run) => void, compare: (one: Run, other: Run) => void}} actions */
  constructor(library, actions) {
    this.library = library;
    this.actions = actions;
    /** @type {Run | null} */
    this.against = null;
    takeFiles("runs", "import", (text) => this.take(text), "runs-note");
  }

  /** @param {Run | null} against the run to compare the chosen one with */
  async show(against) {
    this.against = against;
    fill(byId("run-list"));
    show("runs");
    await this.update();
  }

  /** @private */
  async update() {
    const { against, library } = this;
    const records = await library.store.listRuns().catch((error) => (library.onFailure(error), []));
    fill(byId("runs-heading"), against ? `Compare ${against.method} with` : "Runs");
    const rows = records.filter((record) => record.id !== against?.id).map((record) => this.row(record));
    fill(byId("run-list"), rows.length ? el("ul", { class: "kept" }, rows) : el("p", { class: "muted" }, "There is none yet."));
  }

  /** @private @param {RunRecord} record */
  row(record) {
    const { request, summary } = record;
    const { completionTokens, seconds } = /** @type {any} */ (summary ?? {});
    const question = short(request.messages.findLast(({ role }) => role === "user")?.content ?? "", 90);
    const size = completionTokens === undefined ? "" : `${completionTokens} tokens, ${seconds.toFixed(2)} s`;
    const about = [request.method ?? "plain", record.status, size, new Date(record.created).toLocaleString()];
    const open = async () => {
      const run = await this.library.load(record.id);
      if (!run) return;
      byId("runs").close();
      if (this.against) this.actions.compare(this.against, run);
      else this.actions.open(run);
    };
    const remove = async () => {
      await this.library.deleteRun(record.id);
      await this.update();
    };
    return el(
      "li",
      {},
      el("button", { type: "button", class: "quiet open", onclick: open }, el("span", { dir: "auto" }, question), el("span", { class: "muted small" }, about.filter(Boolean).join(" · "))),
      careful("Delete", remove, `Delete the run: ${question}`),
    );
  }

  /** @private @param {string} text of a file */
  async take(text) {
    const run = await this.library.importRun(text);
    byId("runs").close();
    this.actions.imported(run);
  }
}
