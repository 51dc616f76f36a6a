// The beams of a search as lanes: as many as are held at once.
//
// A lane goes on with the first continuation of its beam. A further continuation gets a lane whose
// beam was pruned, or a new one:
//
//     beam 0  |--- 0 ---|--- 0.0 ---x|--- 0.1.1 ---
//     beam 1  |--- 1 --x|--- 0.1 ----|--- 0.1.0 ---

/** @typedef {import("./run.js").Branch} Branch */
/** @typedef {import("./run.js").Piece} Piece */

/** One step of a beam. */
export class Step {
  /** @param {Branch} lane @param {Step | null} parent the step before @param {number} start seconds */
  constructor(lane, parent, start) {
    this.lane = lane;
    this.parent = parent;
    this.start = start;
    /** @type {number | null} when it was scored or pruned */
    this.end = null;
    this.isPruned = false;
    /** @type {Piece[]} */
    this.pieces = [];
  }

  get text() {
    return this.pieces.map((piece) => (piece.aside ? "" : piece.text)).join("");
  }

  /** The text of the steps before it. */
  get before() {
    const texts = [];
    for (let step = this.parent; step; step = step.parent) texts.push(step.text);
    return texts.reverse().join("");
  }
}

/** The steps of the searches of a run, and their lanes. */
export class Beams {
  /** @param {(path: string, start: number) => Branch} makeLane of a path @param {string} kind "beam" or "particle" */
  constructor(makeLane, kind) {
    this.makeLane = makeLane;
    this.kind = kind;
    /** @type {Map<string, Step>} by branch and numbers */
    this.steps = new Map();
    /** @type {Map<string, Branch[]>} by the path of the branch that searches */
    this.lanes = new Map();
  }

  /**
   * The step with these numbers; a new one where it is not known.
   * @param {Branch} searching the branch that searches
   * @param {number[]} numbers of the samples on the path of the beam
   * @param {number} at
   */
  step(searching, numbers, at) {
    const known = this.known(searching, numbers);
    if (known) return known;
    const parent = this.known(searching, numbers.slice(0, -1)) ?? null;
    const start = parent?.end ?? (parent ? at : searching.start);
    const lane = this.laneFor(searching, parent, start);
    const step = new Step(lane, parent, Math.max(start, lane.last?.end ?? 0));
    lane.end = null;
    lane.isPruned = false;
    lane.steps.push(step);
    this.steps.set(name(searching, numbers), step);
    return step;
  }

  /** The step of a beam, or the nearest one before it. @param {Branch} searching @param {number[]} numbers */
  nearest(searching, numbers) {
    for (let length = numbers.length; length; length--) {
      const step = this.known(searching, numbers.slice(0, length));
      if (step) return step;
    }
    return null;
  }

  /** @private @param {Branch} searching @param {number[]} numbers */
  known(searching, numbers) {
    return this.steps.get(name(searching, numbers));
  }

  /** @private @param {Branch} searching @param {Step | null} parent @param {number} start */
  laneFor(searching, parent, start) {
    if (parent && parent.lane.last === parent) return parent.lane;
    const lanes = this.lanes.get(searching.path) ?? [];
    this.lanes.set(searching.path, lanes);
    const free = lanes.find((lane) => lane.last?.isPruned);
    if (free) return free;
    const lane = this.makeLane(`${searching.path}${searching.path && "."}${this.kind}:${lanes.length}`, start);
    lanes.push(lane);
    return lane;
  }
}

/** @param {Branch} searching @param {number[]} numbers */
function name(searching, numbers) {
  return `${searching.path} ${numbers.join(".")}`;
}
