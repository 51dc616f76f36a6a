// A run: what was asked, the events that came, and its branches. No drawing here.

import { Poll } from "./poll.js";

/**
 * @typedef {{type: string, at?: number, [field: string]: any}} RunEvent
 *
 * @typedef {object} Request
 * @property {string} model
 * @property {{role: string, content: string}[]} messages
 * @property {string} [method]
 * @property {Record<string, any>} [method_params]
 * @property {Record<string, number>} [budget]
 * @property {Record<string, any>} [speculation]
 *
 * @typedef {object} RunRecord what is kept of a run beside its events
 * @property {string} id
 * @property {number} created milliseconds since 1970
 * @property {Request} request
 * @property {string} [conversation]
 * @property {string} [turn]
 * @property {string} [plainOf] the run that this one repeats with plain decoding
 * @property {string} [status]
 * @property {object} [summary]
 *
 * @typedef {[start: number, end: number, accepted: boolean, drafter: string, text?: string]} DraftSpan
 *   characters of a piece's text that were drafted; a rejected draft covers none and has its text
 * @typedef {{at: number, text: string, numTokens: number, drafts: DraftSpan[], aside: string}} Piece
 *   `aside`: what it is, where it is no part of the branch's text, such as a judgement of a beam
 * @typedef {{at: number, branch: string, name: string, why: string, fields: Record<string, any>}} Stage
 */

/** Sequences inside of a branch that have lanes of their own, by the field that numbers them. */
const KINDS = ["beam", "sample", "thread", "worker"];
/** The number of the sample with which a search completes its best beam. */
const COMPLETION = 2 ** 31;

/**
 * The path of a lane: that of its branch, and the kind and numbers of a sequence inside of it.
 * @param {string} branch
 * @param {string} kind
 * @param {any[]} numbers
 */
function pathOf(branch, kind, numbers) {
  return `${branch}${branch && "."}${kind}:${numbers.join(".")}`;
}

/**
 * The kind and the numbers of the sequence that the fields of an event are about.
 * @param {Record<string, any>} fields
 * @returns {[kind: string, numbers: number[]] | null} null: about the branch itself
 */
function sequenceOf(fields) {
  for (const kind of KINDS) {
    const numbers = Array.isArray(fields[kind]) ? fields[kind] : [fields[kind]];
    if (numbers.length && numbers.every(Number.isInteger)) return [kind, numbers];
  }
  return null;
}

/** A branch of a run, or a sequence in it such as a beam of a search, and the text that it streamed. */
export class Branch {
  /** @param {string} path `""` is the request itself, `"2.0"` the first branch of its branch 2 @param {number} start seconds */
  constructor(path, start) {
    this.path = path;
    this.start = start;
    /** @type {number | null} */
    this.end = null;
    this.why = "";
    this.controller = "";
    this.numTokens = 0;
    /** @type {Piece[]} */
    this.pieces = [];
    /** @type {Stage[]} */
    this.stages = [];
    this.isPruned = false;
  }

  /** How deep in the tree it is. */
  get depth() {
    return this.path === "" ? 0 : this.path.split(".").length;
  }

  /** What it is called. */
  get name() {
    if (this.path === "") return "request";
    const [, kind, numbers] = this.path.match(/(\w+):(.*)$/) ?? ["", "branch", this.path];
    return `${kind} ${numbers.replace(String(COMPLETION), "end")}`;
  }

  get text() {
    return this.pieces.map((piece) => (piece.aside ? "" : piece.text)).join("");
  }
}

/** A run, as far as its events have come. */
export class Run {
  /** @param {RunRecord} record */
  constructor(record) {
    this.record = record;
    /** @type {RunEvent[]} */
    this.events = [];
    /** @type {"running" | "done" | "stopped" | "interrupted" | "failed"} */
    this.status = "running";
    this.answer = "";
    this.reasoning = "";
    /** @type {Map<string, Branch>} */
    this.branches = new Map();
    /** @type {Stage[]} */
    this.stages = [];
    /** @type {RunEvent | null} */
    this.started = null;
    /** @type {RunEvent | null} */
    this.finished = null;
    /** @type {any} */
    this.usage = null;
    this.finishReason = "";
    this.error = "";
    this.lastAt = 0;
    /** @type {Map<string, {accepted: number, rejected: number}>} characters by drafter */
    this.drafters = new Map();
    /** @type {Map<string, Poll>} by kind and branch */
    this.polls = new Map();
    /** Path of the branch that was chosen; empty: none was. */
    this.winner = "";
    this.numPruned = 0;
  }

  get id() {
    return this.record.id;
  }

  get isOver() {
    return this.status !== "running";
  }

  get method() {
    return this.record.request.method ?? "plain";
  }

  get question() {
    return this.record.request.messages.findLast((message) => message.role === "user")?.content ?? "";
  }

  /** Seconds that it took, so far or in all. */
  get seconds() {
    return this.finished?.seconds ?? this.lastAt;
  }

  /** Takes in one event. @param {RunEvent} event */
  apply(event) {
    this.events.push(event);
    const at = Number.isFinite(event.at) ? Number(event.at) : this.lastAt;
    this.lastAt = Math.max(this.lastAt, at);
    switch (event.type) {
      case "started":
        this.started = event;
        this.branch("", 0);
        break;
      case "answer":
        this.answer += event.text ?? "";
        this.reasoning += event.reasoning ?? "";
        break;
      case "answered":
        this.finishReason = event.finish_reason;
        break;
      case "usage":
        this.usage = event.usage;
        break;
      case "delta":
        this.onDelta(event, at);
        break;
      case "stage":
        this.onStage(event, at);
        break;
      case "finished":
        this.onFinished(event, at);
        break;
      case "error":
        this.end("failed", at);
        this.error = String(event.message ?? "the run failed");
        break;
      case "stopped":
        if (!this.isOver) this.end("stopped", at);
        break;
      case "interrupted":
        if (!this.isOver) this.end("interrupted", at);
        break;
    }
  }

  /** The branch with this path. @param {string} path @param {number} start of it, where it is new */
  branch(path, start) {
    let found = this.branches.get(path);
    if (!found) {
      found = new Branch(path, start);
      this.branches.set(path, found);
    }
    return found;
  }

  /**
   * The lane that an event is about. That of a beam begins when the beam before it was scored.
   * @private
   * @param {string} path of the branch
   * @param {Record<string, any>} fields
   * @param {number} at
   */
  laneOf(path, fields, at) {
    const sequence = sequenceOf(fields);
    if (!sequence) return this.branch(path, at);
    const [kind, numbers] = sequence;
    const before = this.branches.get(pathOf(path, kind, numbers.slice(0, -1)));
    return this.branch(pathOf(path, kind, numbers), before?.end ?? (numbers.length === 1 ? this.branch(path, 0).start : at));
  }

  /** The text of the beams before one. @param {Branch} branch */
  before(branch) {
    const parents = [];
    for (let path = branch.path; /beam:.*\./.test(path); parents.unshift(this.branches.get(path)?.text ?? "")) {
      path = path.slice(0, path.lastIndexOf("."));
    }
    return parents.join("");
  }

  /** @private @param {RunEvent} event @param {number} at */
  onDelta(event, at) {
    const fields = event.fields ?? {};
    const branch = this.laneOf(event.branch ?? "", fields, at);
    const numTokens = event.num_tokens ?? 0;
    branch.numTokens += numTokens;
    const aside = fields.aside === undefined ? "" : String(fields.aside);
    branch.pieces.push({ at, text: event.text ?? "", numTokens, drafts: event.drafts ?? [], aside });
    for (const [start, end, accepted, drafter, text] of event.drafts ?? []) {
      const count = this.drafters.get(drafter) ?? { accepted: 0, rejected: 0 };
      if (accepted) count.accepted += end - start;
      else count.rejected += (text ?? "").length;
      this.drafters.set(drafter, count);
    }
  }

  /** @private @param {RunEvent} event @param {number} at */
  onStage(event, at) {
    const fields = event.fields ?? {};
    const branch = this.laneOf(event.branch ?? "", fields, at);
    const stage = { at, branch: branch.path, name: String(event.name), why: event.why ?? "", fields };
    if (stage.name === "spawned" && fields.threads === undefined) {
      branch.start = at;
      branch.controller = stage.why;
    } else if (stage.name === "ended") {
      branch.end = at;
      branch.why = stage.why;
    } else {
      branch.stages.push(stage);
      this.stages.push(stage);
      if (Array.isArray(fields.beam)) this.endStep(branch, fields, at);
      if (stage.name === "pruned" && !branch.isPruned) this.prune(branch, at);
      if (stage.name === "selected" && branch.path) this.winner = branch.path;
      if (stage.name === "voted" || stage.name === "probed") this.count(stage);
    }
  }

  /** @private The step of a beam is whole. @param {Branch} branch @param {Record<string, any>} fields @param {number} at */
  endStep(branch, fields, at) {
    if (branch.end !== null) return;
    branch.end = at;
    const [text, streamed] = [String(fields.text ?? ""), branch.text];
    const rest = text.startsWith(streamed) ? text.slice(streamed.length) : "";
    if (rest) branch.pieces.push({ at, text: rest, numTokens: 0, drafts: [], aside: "" });
  }

  /** @private @param {Branch} branch @param {number} at */
  prune(branch, at) {
    branch.isPruned = true;
    this.numPruned++;
    if (branch.path.includes(":")) branch.end ??= at;
  }

  /** @private Takes in a vote, the end of a vote, or the answer of a probe. @param {Stage} stage */
  count({ name, branch, fields }) {
    if (name === "probed") {
      if (fields.answer && fields.difficulty === undefined) this.poll(branch, "probes").add("", { answer: fields.answer });
      return;
    }
    const counting = this.polls.get(`votes ${branch}`);
    if (branch === "" || counting) {
      const poll = counting ?? this.poll(branch, "votes");
      poll.end(/** @type {any} */ (fields));
      this.winner = poll.winningBranch ?? this.winner;
    } else this.poll(branch.slice(0, Math.max(0, branch.lastIndexOf("."))), "votes").add(branch, /** @type {any} */ (fields));
  }

  /** @private @param {string} branch that counts @param {"votes" | "probes"} kind */
  poll(branch, kind) {
    const name = `${kind} ${branch}`;
    const poll = this.polls.get(name) ?? new Poll(branch, kind);
    this.polls.set(name, poll);
    return poll;
  }

  /** @private @param {RunEvent} event @param {number} at */
  onFinished(event, at) {
    this.finished = event;
    this.usage = event.usage ?? this.usage;
    this.finishReason = event.finish_reason ?? this.finishReason;
    if (typeof event.text === "string" && !this.reasoning && event.text !== this.answer) this.answer = event.text;
    this.end("done", at);
  }

  /** @private @param {Run["status"]} status @param {number} at */
  end(status, at) {
    this.status = status;
    for (const branch of this.branches.values()) branch.end ??= at;
  }

  /** The branches in the order of a walk through the tree. @returns {Branch[]} */
  get lanes() {
    const number = (/** @type {string} */ part) => (part.includes(":") ? 1e6 + Number(part.split(":")[1]) : Number(part));
    const key = (/** @type {Branch} */ branch) => (branch.path === "" ? [] : branch.path.split(".").map(number));
    return [...this.branches.values()]
      .map((branch) => ({ branch, key: key(branch) }))
      .sort((a, b) => {
        for (let i = 0; i < Math.min(a.key.length, b.key.length); i++) {
          if (a.key[i] !== b.key[i]) return a.key[i] - b.key[i];
        }
        return a.key.length - b.key.length;
      })
      .map(({ branch }) => branch);
  }
}

/** A run from its record and its events. @param {RunRecord} record @param {RunEvent[]} events */
export function replay(record, events) {
  const run = new Run(record);
  for (const event of events) run.apply(event);
  return run;
}
