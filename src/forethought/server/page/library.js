// Runs and chats: those that are loaded, those that the browser keeps, and those from files.

import { fromFile } from "./export.js";
import { summarize } from "./figures.js";
import { Run, replay } from "./run.js";
import { conversationOf, runOf } from "./saved.js";
import { Store, newId } from "./store.js";
import { forget } from "./stream.js";

/**
 * @typedef {import("./run.js").RunRecord} RunRecord
 * @typedef {import("./run.js").RunEvent} RunEvent
 * @typedef {import("./store.js").Turn} Turn
 * @typedef {import("./store.js").Conversation} Conversation
 * @typedef {{conversation: Conversation, runs: {record: RunRecord, events: RunEvent[]}[]}} SavedChat
 */

const FORMAT = "forethought chats";
const VERSION = 1;

/** What the page has to show. */
export class Library {
  /** @param {(error: unknown) => void} onFailure called when the browser keeps nothing */
  constructor(onFailure) {
    this.store = new Store();
    this.onFailure = onFailure;
    /** @type {Map<string, Run>} runs that are loaded */
    this.runs = new Map();
  }

  // ---- runs ----------------------------------------------------------------------------------

  /** The run that is shown of a turn: the last one. @param {Turn} turn @returns {Run | null} */
  runOf(turn) {
    return this.runs.get(turn.runs[turn.runs.length - 1]) ?? null;
  }

  /** The plain run that was made to compare with a run. @param {Run} run */
  plainOf(run) {
    return [...this.runs.values()].findLast((other) => other.record.plainOf === run.id) ?? null;
  }

  /** A new run, that begins now. @param {Omit<RunRecord, "id" | "created">} record */
  begin(record) {
    const run = new Run({ id: newId(), created: Date.now(), status: "running", ...record });
    this.runs.set(run.id, run);
    this.store.saveRun(run.record).catch(this.onFailure);
    return run;
  }

  /** Keeps how a run went. @param {Run} run */
  async keep(run) {
    run.record = recordOf(run);
    await this.store.saveRun(run.record).catch(this.onFailure);
  }

  /** A run that is loaded or kept. @param {string} id @returns {Promise<Run | null>} */
  async load(id) {
    const known = this.runs.get(id);
    if (known) return known;
    const kept = await this.store.loadRun(id).catch(() => null);
    if (!kept) return null;
    const run = replay(kept.record, kept.events);
    if (!run.isOver && !run.goesOn) {
      const event = { type: "interrupted", at: run.lastAt };
      run.apply(event);
      await this.store.saveEvents({ run: id, number: Number.MAX_SAFE_INTEGER, events: [event] });
      await this.keep(run);
    }
    this.runs.set(id, run);
    return run;
  }

  /** Loads the runs of turns, and those that they were compared with. @param {Turn[]} turns */
  async loadTurns(turns) {
    await Promise.all(turns.flatMap((turn) => turn.runs).map((id) => this.load(id)));
    const records = await this.store.listRuns().catch(() => []);
    const plain = records.filter((record) => record.plainOf && this.runs.has(record.plainOf));
    await Promise.all(plain.map((record) => this.load(record.id)));
  }

  /** @param {string} id */
  async deleteRun(id) {
    const run = await this.load(id);
    if (run?.goesOn) forget(run.place.id);
    await this.store.deleteRun(id).catch(this.onFailure);
    this.runs.delete(id);
  }

  /** @param {string} text of a file @throws {Error} if it holds no run */
  async importRun(text) {
    const { record, events } = fromFile(text);
    const run = replay({ ...record, id: newId(), conversation: undefined, turn: undefined, plainOf: undefined }, events);
    this.runs.set(run.id, run);
    await this.keep(run);
    await this.store.saveEvents({ run: run.id, number: 0, events: run.events });
    return run;
  }

  // ---- chats ---------------------------------------------------------------------------------

  /** All chats, the last one that was asked in first. @returns {Promise<Conversation[]>} */
  async chats() {
    return this.store.listConversations().catch((error) => (this.onFailure(error), []));
  }

  /** The answers of each chat, by its id. @returns {Promise<Map<string, string[]>>} */
  async answers() {
    /** @type {Map<string, string[]>} */
    const answers = new Map();
    for (const { conversation, answer } of await this.store.listRuns().catch(() => [])) {
      if (conversation && answer) answers.set(conversation, [...(answers.get(conversation) ?? []), answer]);
    }
    return answers;
  }

  /** Names a chat, of which another tab may have more by now. @param {Conversation} chat @param {string} title */
  async rename(chat, title) {
    const kept = await this.store.loadConversation(chat.id).catch(() => null);
    await this.store.saveConversation({ ...(kept ?? chat), title }).catch(this.onFailure);
  }

  /**
   * Copies turns of a chat, with their runs, to a new one.
   * @param {Conversation} chat
   * @param {Turn[]} turns each below the one before
   * @param {string} title
   * @returns {Promise<Conversation>}
   */
  async fork(chat, turns, title) {
    const shown = await Promise.all(turns.flatMap((turn) => turn.runs).map((id) => this.load(id)));
    const runs = shown.flatMap((run) => [run, run && this.plainOf(run)]).filter((run) => run !== null);
    const copy = renamed({
      conversation: { ...chat, title, created: Date.now(), turns: structuredClone(turns), active: {} },
      runs: runs.map((run) => ({ record: recordOf(run), events: structuredClone(run.events) })),
    });
    for (const { record, events } of copy.runs) this.runs.set(record.id, replay(record, events));
    await this.keepChat(copy).catch(this.onFailure);
    return copy.conversation;
  }

  /** Deletes a chat with its runs. @param {Conversation} chat */
  async deleteChat(chat) {
    for (const record of await this.runsOf(chat)) await this.deleteRun(record.id);
    await this.store.deleteConversation(chat.id).catch(this.onFailure);
  }

  /** Chats with their runs as the text of a file. @param {Conversation[]} chats @returns {Promise<string>} */
  async chatsToJson(chats) {
    const saved = [];
    for (const conversation of chats) {
      const runs = (await this.runsOf(conversation)).map((record) => this.store.loadRun(record.id));
      saved.push({ conversation, runs: (await Promise.all(runs)).filter((run) => run !== null) });
    }
    return JSON.stringify({ format: FORMAT, version: VERSION, chats: saved });
  }

  /**
   * Keeps the chats of a file, under new names.
   * @param {string} text
   * @returns {Promise<Conversation[]>}
   * @throws {Error} if it holds no chats
   */
  async importChats(text) {
    const chats = chatsOf(text).map(renamed);
    for (const chat of chats.toReversed()) await this.keepChat(chat); // the first of the file is first in the list
    return chats.map(({ conversation }) => conversation);
  }

  /** @private Keeps a chat that is new here, with its runs. @param {SavedChat} chat */
  async keepChat({ conversation, runs }) {
    for (const { record, events } of runs) {
      await this.store.saveRun(record);
      await this.store.saveEvents({ run: record.id, number: 0, events });
    }
    await this.store.saveConversation(conversation, true);
  }

  /** @private The records of a chat's runs, and of those that they were compared with. @param {Conversation} chat */
  async runsOf(chat) {
    return (await this.store.listRuns()).filter((record) => record.conversation === chat.id);
  }
}

/** @param {string} text @returns {SavedChat[]} @throws {Error} if it is no file of chats */
function chatsOf(text) {
  let values;
  try {
    values = JSON.parse(text);
  } catch {
    throw new Error("This file holds no chats: it is no JSON.");
  }
  const { format, version, chats } = values ?? {};
  if (format !== FORMAT || !Array.isArray(chats)) throw new Error("This file holds no chats of forethought.");
  if (version !== VERSION) throw new Error(`These chats are of version ${version}; this page reads version ${VERSION}.`);
  return chats.map(chatOf);
}

/** @param {any} chat @returns {SavedChat} @throws {Error} if it is none */
function chatOf(chat) {
  const conversation = conversationOf(chat?.conversation);
  const runs = Array.isArray(chat?.runs) ? chat.runs.map((/** @type {any} */ run) => runOf(run?.record, run?.events)) : [null];
  if (!conversation || runs.includes(null)) throw new Error("This file holds no chats of forethought.");
  return { conversation, runs: runs.map((/** @type {Run} */ run) => ({ record: recordOf(run), events: run.events })) };
}

/** What is kept of a run, with how it went. @param {Run} run @returns {RunRecord} */
function recordOf(run) {
  return { ...run.record, status: run.status, summary: summarize(run), answer: run.answer };
}

/** A chat with new names for itself and its runs, so that it replaces none. @param {SavedChat} chat @returns {SavedChat} */
function renamed({ conversation, runs }) {
  const id = newId();
  const names = new Map(runs.map(({ record }) => [record.id, newId()]));
  const turns = conversation.turns.map((turn) => ({ ...turn, runs: turn.runs.map((run) => names.get(run) ?? "").filter(Boolean) }));
  return {
    conversation: { ...conversation, id, turns },
    runs: runs.map(({ record, events }) => ({
      record: { ...record, id: names.get(record.id) ?? "", conversation: id, plainOf: record.plainOf && names.get(record.plainOf) },
      events,
    })),
  };
}
