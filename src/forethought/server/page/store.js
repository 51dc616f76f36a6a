// Runs and conversations kept in this browser: IndexedDB, events in batches as they come.

/**
 * @typedef {import("./run.js").RunRecord} RunRecord
 * @typedef {import("./run.js").RunEvent} RunEvent
 * @typedef {import("./attachments.js").Attachment} Attachment
 * @typedef {{id: string, parent: string | null, question: string, runs: string[], created: number, files?: Attachment[], begun?: string}} Turn
 *   `begun`: the answer's beginning, or without a run all of it, as the user wrote it
 * @typedef {{id: string, created: number, used?: number, title?: string, turns: Turn[], active: Record<string, string>, settings?: import("./composer.js").Settings}} Conversation
 *   `active` names the turn shown below each turn; the first turns are below `""`.
 *   `used` is one more than that of any other chat when this one was last asked in: the order of chats, whatever the clock said
 */

const TAIL = "forethought.tail";
const FLUSH_MS = 250;

/** A new name for a run, turn or conversation. */
export function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** When a chat was last asked in, in milliseconds since 1970. @param {Conversation} chat */
export function lastUse(chat) {
  return Math.max(chat.created, ...chat.turns.map((turn) => turn.created));
}

/** @returns {Promise<IDBDatabase>} */
function open() {
  const request = indexedDB.open("forethought", 2);
  request.onupgradeneeded = ({ oldVersion }) => {
    if (oldVersion < 1) {
      request.result.createObjectStore("runs", { keyPath: "id" });
      request.result.createObjectStore("events", { keyPath: ["run", "number"] });
      request.result.createObjectStore("conversations", { keyPath: "id" });
    }
    const chats = /** @type {IDBTransaction} */ (request.transaction).objectStore("conversations");
    chats.createIndex("used", "used");
  };
  return new Promise((resolve, reject) => {
    request.onblocked = () => reject(new Error("an older page is open in another tab: close that one, and load this one again"));
    result(request).then((database) => {
      database.onversionchange = () => database.close(); // a newer page is open in another tab
      resolve(database);
    }, reject);
  });
}

/** What this browser keeps. */
export class Store {
  constructor() {
    this.database = open();
    this.database.catch(() => {});
    /** @private @type {WeakMap<Conversation, Set<string>>} of each chat its turns and runs that this tab has read or kept */
    this.known = new WeakMap();
  }

  /**
   * @private
   * @template T
   * @param {string} name
   * @param {IDBTransactionMode} mode
   * @param {(store: IDBObjectStore) => IDBRequest<T>} use
   */
  async use(name, mode, use) {
    const transaction = (await this.database).transaction(name, mode);
    const done = result(use(transaction.objectStore(name)));
    if (mode === "readwrite") transaction.commit(); // even if the page is left now
    return done;
  }

  /** Takes in the events that were not stored yet when the page was left. */
  async recover() {
    const tail = localStorage.getItem(TAIL);
    if (!tail) return;
    for (const batch of JSON.parse(tail)) await this.use("events", "readwrite", (store) => store.put(batch));
    localStorage.removeItem(TAIL);
  }

  /** @param {RunRecord} record */
  async saveRun(record) {
    await this.use("runs", "readwrite", (store) => store.put(record));
  }

  /** @param {{run: string, number: number, events: RunEvent[]}} batch */
  async saveEvents(batch) {
    await this.use("events", "readwrite", (store) => store.put(batch));
  }

  /** @param {string} id @returns {Promise<{record: RunRecord, events: RunEvent[]} | null>} */
  async loadRun(id) {
    const record = await this.use("runs", "readonly", (store) => store.get(id));
    if (!record) return null;
    const batches = await this.use("events", "readonly", (store) => store.getAll(this.batchesOf(id)));
    return { record, events: batches.flatMap((batch) => batch.events) };
  }

  /** @private @param {string} id */
  batchesOf(id) {
    return IDBKeyRange.bound([id, 0], [id, Infinity]);
  }

  /** The records of all runs, the newest first. @returns {Promise<RunRecord[]>} */
  async listRuns() {
    const records = await this.use("runs", "readonly", (store) => store.getAll());
    return records.sort((a, b) => b.created - a.created);
  }

  /** @param {string} id */
  async deleteRun(id) {
    await this.use("events", "readwrite", (store) => store.delete(this.batchesOf(id)));
    await this.use("runs", "readwrite", (store) => store.delete(id));
  }

  /**
   * Keeps a conversation. Turns and runs that another tab has added to it meanwhile become part of it.
   * @param {Conversation} conversation
   * @param {boolean} [isUsed] whether it comes before all others now; it gets its number in the same transaction, whatever other tabs do
   */
  async saveConversation(conversation, isUsed = false) {
    const transaction = (await this.database).transaction("conversations", "readwrite");
    const chats = transaction.objectStore("conversations");
    const latest = chats.index("used").openKeyCursor(null, "prev");
    const stored = chats.get(conversation.id);
    await new Promise((resolve, reject) => {
      stored.onsuccess = () => {
        if (isUsed) conversation.used = Number(latest.result?.key ?? 0) + 1;
        join(conversation, stored.result, this.known.get(conversation) ?? new Set());
        this.known.set(conversation, idsOf(conversation));
        chats.put(conversation);
        transaction.commit(); // even if the page is left now
      };
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
  }

  /** The conversations that have turns, the last one that was asked in first. @returns {Promise<Conversation[]>} */
  async listConversations() {
    const all = await this.use("conversations", "readonly", (store) => store.getAll());
    return all.filter((chat) => chat.turns.length).sort(byUse);
  }

  /** @param {string} id */
  async deleteConversation(id) {
    await this.use("conversations", "readwrite", (store) => store.delete(id));
  }

  /** @param {string} id @returns {Promise<Conversation | null>} */
  async loadConversation(id) {
    const chat = await this.use("conversations", "readonly", (store) => store.get(id));
    if (chat) this.known.set(chat, idsOf(chat));
    return chat ?? null;
  }
}

/** @param {Conversation} chat */
function idsOf(chat) {
  return new Set(chat.turns.flatMap((turn) => [turn.id, ...turn.runs]));
}

/**
 * Adds to a chat what is stored of it beyond what is known: all else that it lacks was deleted here.
 * @param {Conversation} chat
 * @param {Conversation | undefined} stored
 * @param {Set<string>} known
 */
function join(chat, stored, known) {
  const turns = new Map(chat.turns.map((turn) => [turn.id, turn]));
  for (const other of stored?.turns ?? []) {
    const turn = turns.get(other.id);
    const added = other.runs.filter((run) => !known.has(run) && !turn?.runs.includes(run));
    if (turn) turn.runs.unshift(...added); // the last one is shown
    if (turn || known.has(other.id) || (other.parent !== null && !turns.has(other.parent))) continue;
    turns.set(other.id, other);
    chat.turns.push(other);
  }
}

/** Puts the chat that was asked in last first; those of the first version have the clock alone. @param {Conversation} a @param {Conversation} b */
export function byUse(a, b) {
  return (b.used ?? 0) - (a.used ?? 0) || lastUse(b) - lastUse(a);
}

/**
 * Does something for a run, and says whether no other tab does so now.
 * @param {string} run
 * @param {(isAlone: boolean) => Promise<void>} use
 */
export async function alone(run, use) {
  if (!navigator.locks) return use(true); // a page that is not served securely has none
  await navigator.locks.request(`forethought.run.${run}`, { ifAvailable: true }, (lock) => use(lock !== null));
}

/** Stores the events of one run in batches, a few a second; what is left when the page goes, too. */
export class Recorder {
  /** @param {Store | null} store null: another tab stores them @param {string} run */
  constructor(store, run) {
    this.store = store;
    this.run = run;
    /** Of the next batch: after those of an earlier visit. */
    this.number = Date.now();
    /** @type {RunEvent[]} */
    this.waiting = [];
    /** @type {{run: string, number: number, events: RunEvent[]}[]} batches that are being stored */
    this.under_way = [];
    this.timer = 0;
    this.keep = () => this.keepTail();
    addEventListener("pagehide", this.keep);
  }

  /** @param {RunEvent} event */
  add(event) {
    if (!this.store) return;
    this.waiting.push(event);
    this.timer ||= window.setTimeout(() => this.flush(), FLUSH_MS);
  }

  async flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (!this.store || !this.waiting.length) return;
    const batch = this.batch();
    this.waiting = [];
    this.number++;
    this.under_way.push(batch);
    try {
      await this.store.saveEvents(batch);
    } catch {
      // the browser keeps nothing: the run is lost with the page, as the list of runs says
    } finally {
      this.under_way = this.under_way.filter((each) => each !== batch);
    }
  }

  async close() {
    await this.flush();
    removeEventListener("pagehide", this.keep);
  }

  /** @private */
  batch() {
    return { run: this.run, number: this.number, events: this.waiting };
  }

  /** @private */
  keepTail() {
    const batches = this.waiting.length ? [...this.under_way, this.batch()] : this.under_way;
    try {
      if (batches.length) localStorage.setItem(TAIL, JSON.stringify(batches));
    } catch {
      // more than this browser stores at once: the last moment of the run is lost
    }
  }
}
