// The dialogs that list what the browser keeps: chats, and runs.

import { byId, careful, download, el, fill, quietButton } from "./dom.js";
import { lastUse } from "./library.js";
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

/** The dialog of chats. */
export class ChatList {
  /**
   * @param {Library} library
   * @param {{open: (chat: Conversation) => void, changed: (chat: Conversation) => void, leave: (chat: Conversation) => Promise<void>}} actions
   */
  constructor(library, actions) {
    this.library = library;
    this.actions = actions;
    /** @type {Conversation[]} */
    this.chats = [];
    byId("chat-filter").addEventListener("input", () => this.fill());
    byId("export-chats").addEventListener("click", () => this.save(this.chats, "chats.json"));
    takeFiles("chats", "import-chats", (text) => this.take(text), "chats-note");
  }

  async show() {
    fill(byId("chat-list"));
    show("chats");
    await this.update();
  }

  /** @private */
  async update() {
    this.chats = await this.library.chats();
    this.fill();
  }

  /** @private */
  fill() {
    const wanted = byId("chat-filter").value.trim().toLowerCase();
    const holds = (/** @type {Conversation} */ chat) => [titleOf(chat), ...chat.turns.map((turn) => turn.question)].some((text) => text.toLowerCase().includes(wanted));
    const rows = this.chats.filter(holds).map((chat) => this.row(chat));
    const none = wanted ? "No chat has these words." : "There is none yet: a question begins one.";
    fill(byId("chat-list"), rows.length ? el("ul", { class: "kept" }, rows) : el("p", { class: "muted" }, none));
    byId("export-chats").disabled = !this.chats.length;
  }

  /** @private @param {Conversation} chat */
  row(chat) {
    const title = titleOf(chat);
    const open = () => {
      byId("chats").close();
      this.actions.open(chat);
    };
    const remove = async () => {
      await this.actions.leave(chat);
      await this.library.deleteChat(chat);
      await this.update();
    };
    const about = `${chat.turns.length} ${chat.turns.length === 1 ? "question" : "questions"} · ${new Date(lastUse(chat)).toLocaleString()}`;
    const opener = el("button", { type: "button", class: "quiet open", onclick: open }, el("span", { dir: "auto" }, title), el("span", { class: "muted small" }, about));
    const row = el(
      "li",
      {},
      opener,
      quietButton("Rename", () => this.rename(chat, opener), `Rename the chat: ${title}`),
      quietButton("Export", () => this.save([chat], `chat-${chat.id}.json`), `Export the chat: ${title}`),
      careful("Delete", remove, `Delete the chat: ${title}`),
    );
    return row;
  }

  /** @private @param {Conversation} chat @param {HTMLElement} place */
  rename(chat, place) {
    const input = el("input", { type: "text", value: titleOf(chat), "aria-label": "Title", maxlength: 200 });
    const finish = async () => {
      chat.title = input.value.trim();
      this.actions.changed(chat);
      await this.library.store.saveConversation(chat).catch(this.library.onFailure);
      await this.update();
    };
    const form = el("form", { class: "rename", onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), finish()) }, input, el("button", { class: "primary" }, "Keep"));
    place.replaceWith(form);
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
