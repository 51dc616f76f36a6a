// The branches of a run as lanes on a time axis.
//
// A piece of text is painted once, when it comes. Everything is painted again only when the scale,
// the size, the colours or the order of the lanes change, so a frame costs what is new in it. What
// moves (the present, the pointer, the mark of the chosen lane) is an element above, which the browser
// moves without painting it.

import { describe, kindOf, labelOf } from "./decisions.js";
import { el, fill } from "./dom.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Branch} Branch
 * @typedef {import("./run.js").Stage} Stage
 * @typedef {import("./run.js").Piece} Piece
 * @typedef {{row: number, numPieces: number, numStages: number, alive: number, inked: number, labelled: number, ended: boolean, numPruned: number, seconds: number, numTokens: number}} Lane
 *   how far a branch is painted: its pieces, its stages, and pixels of its line, its tokens and its labels;
 *   and seconds and tokens of what was written without a pause
 */

/** Height of a lane in CSS pixels; style.css has the same for the labels. */
const LANE = 24;
const AXIS = 22;
/** Height of the labels of marks; below them are the marks, so that none crosses another one's label. */
const TEXT = 12;
const MARGIN = 8;
/** The share of the axis without a token after which a lane shows a gap, if it is a pause ... */
const GAP = 0.03;
/** ... in which this many times as many tokens would have come as did. */
const PAUSE = 3;
/** How much of a pruned lane's colour is left. */
const FADED = 0.35;
const NUM_DRAFTER_COLOURS = 6;

/** The colour, from 0, of a drafter of a run. @param {Run} run @param {string} drafter */
export function colourOf(run, drafter) {
  return [...run.drafters.keys()].indexOf(drafter) % NUM_DRAFTER_COLOURS;
}

/** The least of 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10 ... that holds `seconds`. @param {number} seconds */
export function roundRange(seconds) {
  let range = 0.1;
  for (let i = 0; range < seconds; i++) range *= i % 3 === 1 ? 1.5 : i % 3 === 0 ? 2 : 5 / 3;
  return range;
}

/** Draws one run. */
export class Timeline {
  /**
   * @param {HTMLElement} container
   * @param {(path: string, at: number) => void} onSelect called when a lane is chosen, at a time or, for infinity, as it goes on
   */
  constructor(container, onSelect) {
    this.onSelect = onSelect;
    /** @type {Run | null} */
    this.run = null;
    this.selected = "";
    this.range = 1;
    this.fixedRange = 0;
    this.width = 50;
    this.font = "";
    this.colours = { text: "", muted: "", line: "", ink: "", accent: "", good: "", bad: "", drafters: [""] };
    /** @type {Map<string, Lane>} */
    this.painted = new Map();
    /** @type {Branch[]} */
    this.lanes = [];
    this.isStale = true;
    this.state = "";
    this.isChosen = false;
    this.pointer = -1;
    this.labels = el("div", { class: "lane-labels", role: "listbox", "aria-label": "Branches" });
    this.base = el("canvas", { "aria-hidden": "true" });
    this.mark = el("div", { class: "mark", "aria-hidden": "true", hidden: true });
    this.now = el("div", { class: "rule", "aria-hidden": "true", hidden: true });
    this.aim = el("div", { class: "rule", "aria-hidden": "true", hidden: true });
    this.axis = el("canvas", { class: "axis", "aria-hidden": "true" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.plot = el("div", { class: "plot" }, this.base, this.mark, this.now, this.aim, this.tip);
    fill(container, this.axis, this.labels, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.onPointer(event));
    this.plot.addEventListener("pointerleave", () => this.onPointer(null));
    this.plot.addEventListener("click", (event) => this.onClick(event));
    this.labels.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.refresh()).observe(this.plot);
  }

  /** @param {Run | null} run @param {number} [range] seconds of the axis; 0: as many as the run takes */
  show(run, range = 0) {
    this.run = run;
    this.fixedRange = range;
    this.range = 1;
    this.lanes = [];
    this.state = "";
    this.selected = "";
    this.refresh();
    this.frame();
  }

  /** Paint everything again with the next frame. */
  refresh() {
    this.isStale = true;
    if (!this.run || this.run.isOver) requestAnimationFrame(() => this.frame());
  }

  /**
   * @param {string} path
   * @param {boolean} [byHand] whether the user has chosen it, so that it stays
   * @param {number} [at] the time to show it at; by default as it goes on
   */
  choose(path, byHand = false, at = Infinity) {
    this.isChosen ||= byHand;
    this.selected = path;
    for (const label of this.labels.querySelectorAll("button")) {
      const isSelected = label.dataset.path === path;
      label.setAttribute("aria-selected", String(isSelected));
      label.tabIndex = isSelected ? 0 : -1;
    }
    this.onSelect(path, at);
    this.placeMarks();
    this.reveal();
  }

  /** @private Scrolls the lanes, and nothing else, so that the chosen one is in sight. */
  reveal() {
    const label = /** @type {HTMLElement | null} */ (this.labels.querySelector('[aria-selected="true"]'));
    const box = this.labels.parentElement;
    if (!label || !box || box.scrollHeight <= box.clientHeight) return;
    const [top, bottom] = [label.offsetTop - AXIS, label.offsetTop + LANE];
    if (top < box.scrollTop) box.scrollTop = top;
    else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
  }

  /** Paints what has come since the last frame. */
  frame() {
    const run = this.run;
    if (!run) return;
    const state = `${run.branches.size} ${run.winner}`;
    if (state !== this.state) this.layOut(run, state);
    const needed = this.fixedRange || (run.isOver ? Math.max(run.lastAt * 1.04, 0.01) : roundRange(run.now));
    if (needed !== this.range) {
      this.range = needed;
      this.isStale = true;
    }
    if (this.isStale) this.restart();
    for (const branch of this.lanes) this.paintLane(run, branch);
    this.placeMarks();
  }

  // ---- layout --------------------------------------------------------------------------------

  /** @private @param {Run} run @param {string} state what the lanes depend on */
  layOut(run, state) {
    this.state = state;
    const before = this.lanes;
    this.lanes = run.lanes;
    const labels = this.lanes.map((branch) => {
      const isSelected = branch.path === this.selected;
      return el(
        "button",
        {
          type: "button",
          role: "option",
          "data-path": branch.path,
          "data-depth": Math.min(4, branch.depth),
          "aria-selected": String(isSelected),
          "data-state": branch.path === run.winner && branch.path ? "won" : null,
          tabindex: isSelected ? 0 : -1,
          title: branch.controller || null,
          onclick: () => this.choose(branch.path, true),
        },
        branch.name,
        branch.path === run.winner && branch.path && [" ✓", el("span", { class: "hidden" }, " chosen")],
      );
    });
    const hadFocus = this.labels.contains(document.activeElement);
    fill(this.labels, ...labels);
    if (run.winner && run.isOver) this.reveal();
    if (hadFocus) /** @type {HTMLElement | null} */ (this.labels.querySelector('[tabindex="0"]'))?.focus();
    this.isStale ||= before.length !== this.lanes.length || before.some((branch, row) => branch !== this.lanes[row]);
  }

  /** @private Clears the canvases and forgets what was painted. */
  restart() {
    this.isStale = false;
    this.painted.clear();
    this.lanes.forEach((branch, row) => {
      const lane = { row, numPieces: 0, numStages: 0, alive: -1, inked: -1, labelled: -1, ended: false, numPruned: 0, seconds: 0, numTokens: 0 };
      this.painted.set(branch.path, lane);
    });
    this.width = Math.max(50, this.plot.clientWidth);
    const height = Math.max(1, this.lanes.length) * LANE;
    this.plot.style.height = `${height}px`;
    for (const [canvas, tall] of /** @type {[HTMLCanvasElement, number][]} */ ([
      [this.base, height],
      [this.axis, AXIS],
    ])) {
      const ratio = Math.min(2, devicePixelRatio || 1);
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(tall * ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${tall}px`;
      context(canvas).setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.readColours();
    this.paintAxis();
  }

  /** @private */
  readColours() {
    const style = getComputedStyle(this.plot);
    const read = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    const drafters = Array.from({ length: NUM_DRAFTER_COLOURS }, (_, i) => read(`--draft-${i}`));
    this.colours = {
      text: read("--text"), muted: read("--muted"), line: read("--line"), ink: read("--ink"),
      accent: read("--accent"), good: read("--good"), bad: read("--bad"),
      drafters,
    };
    this.font = `11px ${read("--sans") || "sans-serif"}`;
  }

  /** @private @param {number} at seconds */
  x(at) {
    return MARGIN + (Math.min(at, this.range) / this.range) * (this.width - 2 * MARGIN);
  }

  // ---- painting ------------------------------------------------------------------------------

  /** @private */
  paintAxis() {
    const canvas = context(this.axis);
    const { muted, line } = this.colours;
    canvas.font = this.font;
    canvas.textBaseline = "middle";
    const digits = Math.max(0, Math.ceil(1 - Math.log10(this.range)));
    const count = this.width > 500 ? 6 : 3;
    for (let i = 0; i <= count; i++) {
      const at = (this.range * i) / count;
      const x = Math.round(this.x(at)) + 0.5;
      canvas.fillStyle = line;
      canvas.fillRect(x, AXIS - 5, 1, 5);
      canvas.fillStyle = muted;
      canvas.textAlign = i === 0 ? "left" : i === count ? "right" : "center";
      canvas.fillText(i === count ? `${at.toFixed(digits)} s` : at.toFixed(digits), i === 0 ? x - 1 : x, AXIS / 2 - 2);
    }
  }

  /** @private @param {Run} run @param {Branch} branch */
  paintLane(run, branch) {
    const lane = this.painted.get(branch.path);
    if (!lane) return;
    const canvas = context(this.base);
    const top = lane.row * LANE;
    if (branch.numPruned !== lane.numPruned) {
      canvas.clearRect(0, top, this.width, LANE);
      Object.assign(lane, { numPieces: 0, numStages: 0, alive: -1, inked: -1, labelled: -1, ended: false, numPruned: branch.numPruned, seconds: 0, numTokens: 0 });
    }
    if (branch.end === null) lane.ended = false;
    this.paintLife(canvas, lane, branch, branch.end ?? run.now);
    while (lane.numPieces < branch.pieces.length) this.paintPiece(canvas, run, branch, lane);
    canvas.globalAlpha = 1;
    while (lane.numStages < branch.stages.length) {
      this.paintStage(canvas, branch.stages[lane.numStages++], lane, top);
    }
    if (branch.end !== null && !lane.ended) {
      lane.ended = true;
      this.paintEnd(canvas, branch, top);
    }
  }

  /** @private The thin line from the beginning of a branch to its end. @param {CanvasRenderingContext2D} canvas @param {Lane} lane @param {Branch} branch @param {number} until */
  paintLife(canvas, lane, branch, until) {
    const [from, to] = [lane.alive < 0 ? this.x(branch.start) : lane.alive, this.x(until)];
    if (to <= from) return;
    canvas.fillStyle = this.colours.line;
    canvas.fillRect(from, lane.row * LANE + 15, to - from, 1);
    lane.alive = to;
  }

  /** @private @param {CanvasRenderingContext2D} canvas @param {Run} run @param {Branch} branch @param {Lane} lane */
  paintPiece(canvas, run, branch, lane) {
    const number = lane.numPieces++;
    const piece = branch.pieces[number];
    const isFirst = number === 0 || piece.step !== branch.pieces[number - 1].step;
    const before = isFirst ? (piece.step ?? branch).start : branch.pieces[number - 1].at;
    canvas.globalAlpha = (piece.step ?? branch).isPruned ? FADED : 1;
    const isPause = isFirst ? piece.at - before > GAP * this.range : this.pauses(lane, piece, piece.at - before);
    const to = Math.round(2 * this.x(piece.at)) / 2; // half pixels are whole ones on most screens
    if (to <= lane.inked) return; // it is painted already
    const begin = isPause ? to - 1 : Math.round(2 * this.x(before)) / 2;
    const from = Math.min(to - 0.5, Math.max(lane.inked, begin));
    lane.inked = to;
    const top = lane.row * LANE;
    canvas.fillStyle = this.colours.ink;
    canvas.fillRect(from, top + (piece.aside ? 14 : 12), to - from, piece.aside ? 3 : 7);
    const draft = piece.drafts.find(([, , accepted]) => accepted);
    if (!draft) return;
    const covered = piece.drafts.reduce((sum, [start, end, accepted]) => sum + (accepted ? end - start : 0), 0);
    const height = Math.max(2, Math.round((7 * covered) / Math.max(1, piece.text.length)));
    canvas.fillStyle = this.colours.drafters[colourOf(run, draft[3])];
    canvas.fillRect(from, top + 19 - height, to - from, height);
  }

  /** @private Whether there was a pause before a piece; else it counts to the pace of the lane. @param {Lane} lane @param {Piece} piece @param {number} seconds since the piece before */
  pauses(lane, piece, seconds) {
    const usual = lane.numTokens ? (lane.seconds / lane.numTokens) * piece.numTokens : Infinity;
    if (seconds > GAP * this.range && seconds > PAUSE * usual) return true;
    lane.seconds += seconds;
    lane.numTokens += piece.numTokens;
    return false;
  }

  /** @private @param {CanvasRenderingContext2D} canvas @param {Stage} stage @param {Lane} lane @param {number} top */
  paintStage(canvas, stage, lane, top) {
    const kind = kindOf(stage);
    const x = this.x(stage.at);
    const { text, accent, good, bad, muted } = this.colours;
    const colours = { exit: good, pruned: bad, voted: good, selected: good, scored: muted, probed: accent };
    const colour = colours[/** @type {keyof typeof colours} */ (kind)] ?? muted;
    canvas.fillStyle = canvas.strokeStyle = colour;
    canvas.lineWidth = 1.5;
    if (kind === "pruned") cross(canvas, x, top + 15.5);
    else if (kind === "voted" || kind === "selected") diamond(canvas, x, top + 15.5);
    else if (kind === "scored") canvas.fillRect(x - 2, top + 13.5, 4, 4);
    else tick(canvas, kind, x, top + TEXT, LANE - 1 - TEXT);
    const label = labelOf(stage);
    if (!label) return;
    canvas.font = this.font;
    canvas.textBaseline = "alphabetic";
    canvas.textAlign = "left";
    const width = canvas.measureText(label).width;
    let left = x + 4;
    if (left + width > this.width) left = x - 4 - width;
    if (left <= lane.labelled) return;
    if (!["scored", "voted"].includes(kind)) tick(canvas, kind, x, top + 2, TEXT - 2);
    canvas.fillStyle = kind === "exit" || kind === "voted" ? colour : text;
    canvas.fillText(label, left, top + 10);
    lane.labelled = left + width + 4;
  }

  /** @private @param {CanvasRenderingContext2D} canvas @param {Branch} branch @param {number} top */
  paintEnd(canvas, branch, top) {
    const x = this.x(branch.end ?? 0);
    const failed = branch.why === "failed" || branch.why === "budget";
    canvas.fillStyle = failed ? this.colours.bad : this.colours.muted;
    canvas.fillRect(x - 0.5, top + 11, 1.5, 9);
  }

  /** @private */
  placeMarks() {
    const row = this.painted.get(this.selected)?.row;
    this.mark.hidden = row === undefined;
    this.mark.style.transform = `translateY(${(row ?? 0) * LANE}px)`;
    place(this.now, this.run && !this.run.isOver ? this.x(this.run.now) : -1);
    place(this.aim, this.pointer);
  }

  // ---- pointer and keys ----------------------------------------------------------------------

  /** @private @param {MouseEvent} event */
  laneAt(event) {
    return this.lanes[Math.floor((event.clientY - this.plot.getBoundingClientRect().top) / LANE)];
  }

  /** @private The time at a place of the plot. @param {number} x */
  timeAt(x) {
    return Math.max(0, ((x - MARGIN) / (this.width - 2 * MARGIN)) * this.range);
  }

  /** @private @param {MouseEvent} event */
  onClick(event) {
    const at = this.timeAt(event.clientX - this.plot.getBoundingClientRect().left);
    this.choose(this.laneAt(event)?.path ?? this.selected, true, at);
  }

  /** @private @param {MouseEvent | null} event */
  onPointer(event) {
    const box = this.plot.getBoundingClientRect();
    this.pointer = event ? event.clientX - box.left : -1;
    const branch = event && this.laneAt(event);
    this.tip.hidden = !branch;
    if (branch) {
      fill(this.tip, ...this.described(branch, this.timeAt(this.pointer)).map((line) => el("div", {}, line)));
      const row = this.painted.get(branch.path)?.row ?? 0;
      const left = Math.min(this.pointer + 12, this.width - 230);
      this.tip.style.left = `${Math.max(0, left)}px`;
      this.tip.style.top = `${(row + 1) * LANE}px`;
    }
    this.placeMarks();
  }

  /** @private What the pointer is at. @param {Branch} branch @param {number} at @returns {string[]} */
  described(branch, at) {
    const nearness = (8 / this.width) * this.range;
    const stage = branch.stages.find((each) => Math.abs(each.at - at) < nearness);
    let tokens = 0;
    for (const piece of branch.pieces) {
      if (piece.at > at) break;
      tokens += piece.numTokens;
    }
    const head = `${branch.name} · ${at.toFixed(2)} s · ${tokens} tokens`;
    const ended = branch.end !== null && at > branch.end ? [`ended: ${branch.why || "done"}`] : [];
    return stage ? [head, describe(stage)] : [head, ...ended];
  }

  /** @private @param {KeyboardEvent} event */
  onKey(event) {
    const now = this.lanes.findIndex((branch) => branch.path === this.selected);
    const last = this.lanes.length - 1;
    const steps = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: last };
    const next = steps[/** @type {keyof typeof steps} */ (event.key)];
    if (next === undefined) return;
    event.preventDefault();
    this.choose(this.lanes[Math.max(0, Math.min(last, next))].path, true);
    /** @type {HTMLElement | null} */ (this.labels.querySelector('[tabindex="0"]'))?.focus();
  }
}

/** Moves a vertical line to `x`; below 0: hides it. @param {HTMLElement} line @param {number} x */
function place(line, x) {
  line.hidden = x < 0;
  if (x >= 0) line.style.transform = `translateX(${Math.round(x)}px)`;
}

/** @param {HTMLCanvasElement} canvas */
function context(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

/** @param {CanvasRenderingContext2D} canvas @param {string} kind @param {number} x @param {number} top @param {number} height */
function tick(canvas, kind, x, top, height) {
  canvas.fillRect(x - (kind === "exit" ? 1 : 0.5), top, kind === "exit" ? 2.5 : 1, height);
}

/** @param {CanvasRenderingContext2D} canvas @param {number} x @param {number} y */
function cross(canvas, x, y) {
  canvas.beginPath();
  canvas.moveTo(x - 3.5, y - 3.5);
  canvas.lineTo(x + 3.5, y + 3.5);
  canvas.moveTo(x + 3.5, y - 3.5);
  canvas.lineTo(x - 3.5, y + 3.5);
  canvas.stroke();
}

/** @param {CanvasRenderingContext2D} canvas @param {number} x @param {number} y */
function diamond(canvas, x, y) {
  canvas.beginPath();
  canvas.moveTo(x, y - 5);
  canvas.lineTo(x + 5, y);
  canvas.lineTo(x, y + 5);
  canvas.lineTo(x - 5, y);
  canvas.fill();
}
