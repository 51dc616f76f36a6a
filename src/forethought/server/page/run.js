// A run: what was asked, the events that came, and what they add up to. No drawing here.

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
 * @typedef {{at: number, text: string, numTokens: number, drafts: DraftSpan[]}} Piece
 * @typedef {{at: number, branch: string, name: string, why: string, fields: Record<string, any>}} Stage
 */

/** Between the path of the branch that searches and the numbers of a beam, in the path of its lane. */
const BEAM = "beam:";

/** A branch of a run, or a beam of a search in it, and the text that it streamed. */
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
    return this.path.includes(BEAM) ? `beam ${this.path.split(BEAM)[1]}` : this.path;
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }
}

/** Names of stages by which a method ends early. */
const EXITS = new Set(["early_exit", "stopped"]);

/** @param {Stage} stage what a mark on a lane stands for */
export function kindOf(stage) {
  if (EXITS.has(stage.name)) return "exit";
  if (["probed", "scored", "pruned", "voted", "selected"].includes(stage.name)) return stage.name;
  return "other";
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
   * The lane of a beam: from when the beam before it was scored until it is scored itself.
   * @private
   * @param {string} searching path of the branch that searches
   * @param {Record<string, any>} fields `beam`: the numbers of the samples on its path; `text`: its last step
   * @param {number} at
   */
  beam(searching, fields, at) {
    const path = (/** @type {any[]} */ numbers) => `${searching}${searching && "."}${BEAM}${numbers.join(".")}`;
    const before = this.branches.get(path(fields.beam.slice(0, -1)));
    const found = this.branch(path(fields.beam), before?.end ?? this.branch(searching, 0).start);
    if (found.end === null) {
      found.end = at;
      found.pieces.push({ at, text: String(fields.text ?? ""), numTokens: 0, drafts: [] });
    }
    return found;
  }

  /** @private @param {RunEvent} event @param {number} at */
  onDelta(event, at) {
    const branch = this.branch(event.branch ?? "", at);
    const numTokens = event.num_tokens ?? 0;
    branch.numTokens += numTokens;
    branch.pieces.push({ at, text: event.text ?? "", numTokens, drafts: event.drafts ?? [] });
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
    const branch = Array.isArray(fields.beam) ? this.beam(event.branch ?? "", fields, at) : this.branch(event.branch ?? "", at);
    const stage = { at, branch: branch.path, name: String(event.name), why: event.why ?? "", fields };
    if (stage.name === "spawned") {
      branch.start = at;
      branch.controller = stage.why;
    } else if (stage.name === "ended") {
      branch.end = at;
      branch.why = stage.why;
    } else {
      branch.stages.push(stage);
      branch.isPruned ||= stage.name === "pruned";
      this.stages.push(stage);
    }
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
    const number = (/** @type {string} */ part) => (part.startsWith(BEAM) ? 1e6 + Number(part.slice(BEAM.length)) : Number(part));
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

/**
 * The figures of a run.
 * @param {Run} run
 */
export function summarize(run) {
  const usage = run.usage ?? {};
  const lanes = [...run.branches.values()];
  const streamed = lanes.reduce((sum, branch) => sum + branch.numTokens, 0);
  const speculation = run.finished?.speculation ?? {};
  const { steps = 0, drafted = 0, accepted = 0 } = speculation;
  return {
    status: run.status,
    method: run.method,
    seconds: run.seconds,
    promptTokens: usage.prompt_tokens ?? null,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? null,
    completionTokens: usage.completion_tokens ?? streamed,
    reasoningTokens: usage.completion_tokens_details?.reasoning_tokens ?? null,
    numBranches: Math.max(0, lanes.length - 1),
    steps,
    drafted,
    accepted,
    acceptedByPosition: speculation.accepted_by_position ?? [],
    tokensPerStep: steps ? 1 + accepted / steps : null,
    finishReason: run.finishReason,
  };
}

/** @typedef {ReturnType<typeof summarize>} Summary */

/**
 * What a run saved against the same question with plain decoding, in words.
 * @param {Run} run
 * @param {Run} plain
 * @returns {string}
 */
export function savings(run, plain) {
  if (run.status !== "done" || plain.status !== "done") return "Not known: one of the two did not finish.";
  const [mine, other] = [summarize(run), summarize(plain)];
  const tokens = difference(other.completionTokens - mine.completionTokens, other.completionTokens, "tokens", 0);
  const seconds = difference(other.seconds - mine.seconds, other.seconds, "s", 2);
  return `${tokens}, ${seconds}`;
}

/** @param {number} saved @param {number} of @param {string} unit @param {number} digits */
function difference(saved, of, unit, digits) {
  const share = of ? ` (${Math.round((Math.abs(saved) / of) * 100)} %)` : "";
  return `${Math.abs(saved).toFixed(digits)} ${unit}${share} ${saved >= 0 ? "less" : "more"}`;
}

/**
 * What speculation did in a run: off and why, or whether it paid.
 * @param {Run} run
 * @param {Run | null} plain the same question with plain decoding, where that was run
 * @returns {string}
 */
export function explainSpeculation(run, plain) {
  const told = run.started?.speculation;
  const drafter = told?.drafter;
  if (!drafter || drafter === "none") return `Off${told?.reason ? `: ${told.reason}` : "."}`;
  const note = told.reason ? ` ${told.reason}` : "";
  if (!run.finished) return `${drafter}.${note}`;
  const { steps, drafted, accepted, tokensPerStep } = summarize(run);
  if (!steps) return `${drafter}: the server reports no decode steps.${note}`;
  if (!drafted) return `${drafter} proposed nothing: every step gave one token.${note}`;
  const rate = `${drafter}: ${accepted} of ${drafted} draft tokens accepted, ${tokensPerStep?.toFixed(2)} tokens a step.`;
  return `${rate}${paid(run, plain)}${note}`;
}

/** @param {Run} run @param {Run | null} plain */
function paid(run, plain) {
  if (!plain || plain.status !== "done" || run.method !== plain.method) return "";
  const perToken = (/** @type {Run} */ each) => (1000 * each.seconds) / Math.max(1, summarize(each).completionTokens);
  const [mine, other] = [perToken(run), perToken(plain)];
  const times = ` ${mine.toFixed(2)} ms a token against ${other.toFixed(2)} ms without`;
  if (mine <= other) return `${times}: ${(other / mine).toFixed(2)} times as fast.`;
  return `${times}: it lost, because a step with drafts costs more than the tokens that it adds.`;
}
