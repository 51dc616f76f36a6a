// A run: what was asked, the events that came, and its branches. No drawing here.

import { Beams } from "./beams.js";
import { Poll } from "./poll.js";
import { short } from "./text.js";
import { grow } from "./tools.js";

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
 * @property {boolean} [continue_final_message]
 * @property {object[]} [tools]
 *
 * @typedef {object} RunRecord what is kept of a run beside its events
 * @property {string} id
 * @property {number} created milliseconds since 1970
 * @property {Request} request
 * @property {string} [conversation]
 * @property {string} [turn]
 * @property {string} [begun] the beginning of the answer, which the request has
 * @property {string} [plainOf] the run that this one repeats with plain decoding
 * @property {string} [status]
 * @property {string} [answer] once it is over, for the search among chats
 * @property {object} [summary]
 *
 * @typedef {[start: number, end: number, accepted: boolean, drafter: string, text?: string]} DraftSpan
 *   characters of a piece's text that were drafted; a rejected draft covers none and has its text
 * @typedef {{at: number, text: string, numTokens: number, drafts: DraftSpan[], aside: string, step: Step | null}} Piece
 *   `aside`: what it is, where it is no part of the branch's text, such as a judgement of a beam
 * @typedef {{at: number, branch: string, name: string, why: string, fields: Record<string, any>, isEnd: boolean}} Stage
 *   `isEnd`: whether a vote has ended
 * @typedef {import("./beams.js").Step} Step
 */

/** Sequences inside of a branch that have lanes of their own, by the field that numbers them. */
const KINDS = ["sample", "thread", "worker"];
/** Characters of what a method calls a lane. */
const MAX_LABEL = 16;

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
    /** What the method calls it; empty: what it is and its number. */
    this.label = "";
    /** @type {Step[]} of a beam */
    this.steps = [];
    this.numPruned = 0;
  }

  /** The step of a beam that its lane is at. */
  get last() {
    return this.steps[this.steps.length - 1] ?? null;
  }

  /** The step of a beam that was written at a time. @param {number} at */
  stepAt(at) {
    return this.steps.findLast((step) => step.start <= at) ?? this.last;
  }

  /** How deep in the tree it is. */
  get depth() {
    return this.path === "" ? 0 : this.path.split(".").length;
  }

  /** What it is called. */
  get name() {
    if (this.path === "") return "request";
    if (this.label) return this.label;
    const [, kind, numbers] = this.path.match(/(\w+):(.*)$/) ?? ["", "branch", this.path];
    return `${kind} ${numbers}`;
  }

  /** All of it; of a beam, the text up to its last step. */
  get text() {
    if (this.last) return this.last.before + this.last.text;
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
    this.answer = this.begun;
    this.reasoning = "";
    /** @type {import("./tools.js").Call[]} */
    this.calls = [];
    this.round = 0;
    /** The answer before the present round. */
    this.before = this.begun;
    /** Seconds at which the present round began, and tokens of those before it. */
    this.roundAt = 0;
    this.spent = { prompt_tokens: 0, completion_tokens: 0 };
    /** @type {string[]} texts of the rounds before it */
    this.said = [];
    /** @type {import("./stream.js").Place} where its events, in the present round, are */
    this.place = { id: "", after: -1, isOver: false };
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
    /** @type {(() => number) | null} tells the seconds since it began, while it is asked from this page */
    this.clock = null;
    /** @type {Map<string, {accepted: number, rejected: number}>} characters by drafter */
    this.drafters = new Map();
    /** @type {Map<string, Poll>} by kind and branch */
    this.polls = new Map();
    /** Path of the branch that was chosen; empty: none was. */
    this.winner = "";
    this.beams = new Beams((path, start) => this.branch(path, start), /^particle/.test(this.method) ? "particle" : "beam");
  }

  get id() {
    return this.record.id;
  }

  /** The beginning of the answer, which the request has. */
  get begun() {
    return this.record.begun ?? "";
  }

  get isOver() {
    return this.status !== "running";
  }

  /** Whether the server may have more of it. */
  get goesOn() {
    return !this.isOver && this.place.id !== "" && !this.place.isOver;
  }

  get method() {
    return this.record.request.method ?? "plain";
  }

  get question() {
    return this.record.request.messages.findLast((message) => message.role === "user")?.content ?? "";
  }

  /** Seconds since it began, up to now or to its end. */
  get now() {
    return this.isOver || !this.clock ? this.lastAt : Math.max(this.lastAt, this.clock());
  }

  /** Seconds that it took, so far or in all. */
  get seconds() {
    return this.finished?.seconds ?? this.now;
  }

  /** Whether text has come. */
  get hasBegun() {
    return this.answer.length > this.begun.length || Boolean(this.reasoning) || [...this.branches.values()].some((branch) => branch.pieces.length);
  }

  /** Takes in one event. @param {RunEvent} event */
  apply(event) {
    this.events.push(event);
    const at = Number.isFinite(event.at) ? Number(event.at) : this.lastAt;
    this.lastAt = Math.max(this.lastAt, at);
    this.place.after = event.number ?? this.place.after;
    switch (event.type) {
      case "response":
        this.place.id = event.id;
        break;
      case "started":
        this.started = event;
        this.branch("", 0).end = null;
        break;
      case "calling":
        grow(this.calls, this.round, event.calls);
        break;
      case "called":
        this.onCalled(event);
        break;
      case "round":
        this.round++;
        this.roundAt = at;
        this.spent = event.spent;
        this.said.push(this.answer.slice(this.before.length));
        this.place = { id: "", after: -1, isOver: false };
        this.before = this.answer += this.answer.length > this.before.length ? "\n\n" : "";
        break;
      case "answer":
        this.answer += event.text ?? "";
        this.reasoning += event.reasoning ?? "";
        break;
      case "answered":
        this.finishReason = event.finish_reason;
        this.usage = event.usage ?? this.usage;
        this.place.isOver = true;
        break;
      case "usage": // of runs that earlier versions have kept
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
   * The lane that an event is about, and the step of a beam.
   * @private
   * @param {RunEvent} event
   * @param {number} at
   * @returns {{lane: Branch, step: Step | null}}
   */
  placeOf({ branch: path = "", fields = {} }, at) {
    const branch = this.branch(path, at);
    if (Array.isArray(fields.beam) && fields.beam.every(Number.isInteger)) {
      const isStep = fields.beam.length > 0 && fields.aside === undefined;
      const step = isStep ? this.beams.step(branch, fields.beam, at) : this.beams.nearest(branch, fields.beam);
      return { lane: step?.lane ?? branch, step };
    }
    const kind = KINDS.find((field) => Number.isInteger(fields[field]));
    if (!kind) return { lane: branch, step: null };
    const lane = this.branch(`${path}${path && "."}${kind}:${fields[kind]}`, branch.start);
    if (typeof fields.name === "string") lane.label = short(fields.name, MAX_LABEL);
    return { lane, step: null };
  }

  /** @private @param {Branch} lane @param {Piece} piece */
  write(lane, piece) {
    lane.pieces.push(piece);
    lane.numTokens += piece.numTokens;
    piece.step?.pieces.push(piece);
  }

  /** @private @param {RunEvent} event @param {number} at */
  onDelta(event, at) {
    const fields = event.fields ?? {};
    const { lane, step } = this.placeOf(event, at);
    const aside = fields.aside === undefined ? "" : String(fields.aside);
    this.write(lane, { at, text: event.text ?? "", numTokens: event.num_tokens ?? 0, drafts: event.drafts ?? [], aside, step });
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
    const { lane: branch, step } = this.placeOf(event, at);
    const stage = { at, branch: branch.path, name: String(event.name), why: event.why ?? "", fields, isEnd: false };
    if (stage.name === "scored" && fields.steps && this.beams.steps.size) return; // its beam is told as scored, too
    if (stage.name === "spawned" && fields.threads === undefined) {
      branch.start = at;
      branch.controller = stage.why;
    } else if (stage.name === "ended") {
      branch.end = at;
      branch.why = stage.why;
    } else {
      branch.stages.push(stage);
      this.stages.push(stage);
      if (step) this.endStep(step, fields, at);
      if (stage.name === "pruned") this.prune(branch, step, at);
      if (stage.name === "selected" && branch.path) this.winner = branch.path;
      if (stage.name === "voted" || stage.name === "probed") this.count(stage);
      if (stage.name === "early_exit" && fields.answer) this.poll(branch.path, "probes").end({ answer: fields.answer }, stage.why);
    }
  }

  /** @private The step of a beam is whole. @param {Step} step @param {Record<string, any>} fields @param {number} at */
  endStep(step, fields, at) {
    if (step.end !== null) return;
    step.end = step.lane.end = at;
    const [text, streamed] = [String(fields.text ?? ""), step.text];
    const rest = text.startsWith(streamed) ? text.slice(streamed.length) : "";
    if (rest) this.write(step.lane, { at, text: rest, numTokens: 0, drafts: [], aside: "", step });
  }

  /** @private @param {Branch} lane @param {Step | null} step @param {number} at */
  prune(lane, step, at) {
    if (step) step.isPruned = true;
    else if (lane.path.includes(":")) lane.end ??= at;
    lane.isPruned = !step || lane.last === step;
    lane.numPruned++;
  }

  /** @private Takes in a vote, the end of a vote, or the answer of a probe. @param {Stage} stage */
  count(stage) {
    const { name, branch, fields } = stage;
    if (name === "probed") {
      if (fields.answer && fields.difficulty === undefined) this.poll(branch, "probes").add("", { answer: fields.answer });
      return;
    }
    const counting = this.polls.get(`votes ${branch}`);
    if (branch === "" || counting) {
      const poll = counting ?? this.poll(branch, "votes");
      stage.isEnd = true;
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

  /** The calls of the present round. */
  get pending() {
    return this.calls.filter(({ round }) => round === this.round);
  }

  /** @private @param {RunEvent} event */
  onCalled({ index, result, is_error: isError, seconds }) {
    const call = this.pending.find((other) => other.index === index);
    if (call) Object.assign(call, { result: String(result), isError: Boolean(isError), seconds: Number(seconds) });
  }

  /** @private @param {RunEvent} event @param {number} at */
  onFinished(event, at) {
    this.finished = event;
    this.usage = event.usage ?? this.usage;
    this.finishReason = event.finish_reason ?? this.finishReason;
    if (typeof event.text === "string" && !this.reasoning) this.answer = this.before + event.text;
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
