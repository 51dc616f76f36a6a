// One run in detail: its figures, its lanes, the text of a branch, what the method decided.

import { describe } from "./decisions.js";
import { el, fill } from "./dom.js";
import { explainSpeculation, glance, rateText, savings, summarize } from "./figures.js";
import { TextView } from "./text.js";
import { Timeline, colourOf } from "./timeline.js";
import { VotesView } from "./votes.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Piece} Piece
 * @typedef {import("./run.js").Step} Step
 * @typedef {import("./figures.js").Summary} Summary
 * @typedef {{label: string, onclick: () => void}} Action
 */

/** Stages that are listed; the newest are kept. */
const MAX_LISTED = 400;

const STATUS = { running: "running", done: "done", stopped: "stopped", interrupted: "interrupted", failed: "failed" };

/** Shows one run. */
export class RunView {
  /** @param {Run} run @param {Action[]} actions @param {number} [range] seconds of the time axis; 0: its own */
  constructor(run, actions, range = 0) {
    this.run = run;
    /** @type {Run | null} */
    this.plain = null;
    this.numPieces = 0;
    this.numStages = 0;
    this.branch = "";
    /** @type {Step | null} of the branch, a beam, whose text is shown */
    this.step = null;
    this.followsBranch = true;
    this.lastFigures = 0;
    this.title = el("h2", {}, run.method);
    this.status = el("span", { class: "status" });
    this.actions = el("div", { class: "row wrap" }, actions.map(({ label, onclick }) => el("button", { type: "button", class: "quiet", onclick }, label)));
    this.question = el("p", { class: "muted small asked", dir: "auto" });
    new TextView(this.question).append(run.question.slice(0, 300));
    this.figures = el("dl", { class: "figures" });
    this.speculation = el("p", { class: "small speculation" });
    this.votes = new VotesView(run);
    const lanes = el("div", { class: "timeline" });
    this.legend = el("div", { class: "legend small muted" });
    this.branchName = el("h3", {}, "Text");
    this.text = new TextView(el("div", { class: "branch-text", tabindex: 0, role: "group", "aria-label": "Text of the branch", dir: "auto" }));
    this.asides = el("div", { class: "asides" });
    /** @type {Map<string, TextView>} what is about the branch and no part of its text, by its name */
    this.asideTexts = new Map();
    this.stages = el("ol", { class: "stages", tabindex: 0, "aria-label": "What the method decided" });
    this.noStages = el("p", { class: "muted small" }, "The method has decided nothing yet.");
    this.element = el(
      "article",
      { class: "run", "aria-label": `Run of ${run.method}` },
      el("header", { class: "row wrap" }, this.title, this.status, el("span", { class: "spacer" }), this.actions),
      this.question,
      this.figures,
      this.speculation,
      this.votes.element,
      el("h3", {}, "Branches"),
      lanes,
      this.legend,
      el("div", { class: "columns" }, el("section", {}, this.branchName, this.text.element, this.asides), el("section", {}, el("h3", {}, "Decisions"), this.noStages, this.stages)),
    );
    this.timeline = new Timeline(lanes, (path, at) => this.choose(path, at));
    this.timeline.show(run, range);
    this.timeline.choose(this.firstBranch());
  }

  /** @private The branch whose text is shown at first: the request, unless all text is in branches. */
  firstBranch() {
    const lanes = this.run.lanes;
    return (lanes.find((branch) => branch.pieces.length) ?? lanes[0])?.path ?? "";
  }

  /** @param {Run | null} plain the same question with plain decoding */
  against(plain) {
    this.plain = plain;
    this.update(true);
  }

  /** @param {string} path @param {number} at the time to show it at; infinity: as it goes on */
  choose(path, at) {
    const branch = this.run.branches.get(path);
    this.branch = path;
    this.followsBranch = at === Infinity;
    this.show(branch?.stepAt(at) ?? null);
  }

  /** @private Shows the text of the branch, or of one step of a beam. @param {Step | null} step */
  show(step) {
    const name = this.run.branches.get(this.branch)?.name ?? "request";
    this.step = step;
    this.numPieces = 0;
    this.text.clear();
    this.asideTexts.clear();
    fill(this.asides);
    fill(this.branchName, `Text of ${name}${step?.isPruned ? ", pruned" : ""}`);
    if (step) this.text.append(step.before, "muted", "the steps before");
    this.updateText();
  }

  /** Shows what has come since. @param {boolean} [all] the figures too, which else follow a few times a second */
  update(all = false) {
    if (!this.timeline.isChosen && this.wanted() !== this.branch) this.timeline.choose(this.wanted());
    this.timeline.frame();
    this.votes.update();
    this.updateText();
    this.updateStages();
    const now = performance.now();
    if (!all && !this.run.isOver && now - this.lastFigures < 200) return;
    this.lastFigures = now;
    this.updateFigures();
  }

  /** @private The branch that is shown until another one is chosen: at the end, the one that the method chose. */
  wanted() {
    if (this.run.isOver && this.run.winner && this.run.branches.has(this.run.winner)) return this.run.winner;
    return this.run.branches.get(this.branch)?.pieces.length ? this.branch : this.firstBranch();
  }

  /** @private */
  updateText() {
    const branch = this.run.branches.get(this.branch);
    if (!branch) return;
    if (this.followsBranch && branch.last !== this.step) return this.show(branch.last);
    const { pieces } = this.step ?? branch;
    const box = this.text.element;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const isNew = this.numPieces < pieces.length;
    /** @type {string[]} text without drafts, appended at once */
    let plain = [];
    while (this.numPieces < pieces.length) {
      const piece = pieces[this.numPieces++];
      if (piece.aside) {
        this.appendAside(piece);
        continue;
      }
      if (!piece.drafts.length) {
        plain.push(piece.text);
        continue;
      }
      this.text.append(plain.join(""));
      plain = [];
      this.appendDrafted(piece);
    }
    this.text.append(plain.join(""));
    if (isNew && atEnd && !this.run.isOver) box.scrollTop = box.scrollHeight;
  }

  /** @private @param {Piece} piece */
  appendAside({ aside, text }) {
    let view = this.asideTexts.get(aside);
    if (!view) {
      view = new TextView(el("div", { class: "said", dir: "auto" }));
      this.asideTexts.set(aside, view);
      this.asides.append(el("h3", {}, aside), view.element);
    }
    view.append(text);
  }

  /** @private @param {Piece} piece */
  appendDrafted(piece) {
    const characters = /[\ud800-\udfff]/.test(piece.text) ? [...piece.text] : piece.text;
    const part = (/** @type {number} */ from, /** @type {number} */ to) => {
      const slice = characters.slice(from, to);
      return typeof slice === "string" ? slice : slice.join("");
    };
    let position = 0;
    for (const [start, end, accepted, drafter, text] of piece.drafts) {
      this.text.append(part(position, start));
      const colour = `draft draft-${colourOf(this.run, drafter)}`;
      if (accepted) this.text.append(part(start, end), colour, `drafted by ${drafter}, accepted`);
      else {
        const at = start < characters.length ? start + 1 : start;
        this.text.append(part(start, at) || "\u200a", `${colour} rejected`, `${drafter} proposed ${JSON.stringify(text ?? "")} here: rejected`);
        position = Math.max(at, position);
        continue;
      }
      position = Math.max(end, position);
    }
    this.text.append(part(position, Infinity));
  }

  /** @private */
  updateStages() {
    const stages = this.run.stages;
    if (this.numStages === stages.length) return;
    const fresh = stages.slice(Math.max(this.numStages, stages.length - MAX_LISTED));
    this.numStages = stages.length;
    const atEnd = this.stages.scrollHeight - this.stages.scrollTop - this.stages.clientHeight < 40;
    for (const stage of fresh) {
      const where = this.run.branches.get(stage.branch)?.name ?? stage.branch;
      const text = el("span", { dir: "auto" }, describe(stage));
      this.stages.append(el("li", {}, el("span", { class: "muted" }, `${stage.at.toFixed(2)} s`), el("span", { class: "muted" }, where), text));
    }
    while (this.stages.children.length > MAX_LISTED) this.stages.firstElementChild?.remove();
    this.noStages.hidden = true;
    if (atEnd) this.stages.scrollTop = this.stages.scrollHeight;
  }

  /** @private */
  updateFigures() {
    const run = this.run;
    const summary = summarize(run);
    fill(this.status, STATUS[run.status]);
    this.status.dataset.status = run.status;
    fill(this.figures, figuresOf(summary, run, this.plain).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    fill(this.speculation, el("strong", {}, "Speculation "), explainSpeculation(run, this.plain));
    this.noStages.hidden = run.stages.length > 0;
    if (run.isOver) fill(this.noStages, "The method told of no decision.");
    if (run.error) fill(this.status, `failed: ${run.error}`);
    const named = [...run.drafters].map(([drafter, { accepted, rejected }]) => [
      el("span", { class: `swatch draft-${colourOf(run, drafter)}` }),
      `${drafter}: ${accepted} characters accepted, ${rejected} rejected`,
    ]);
    const drafted = summary.drafted && !run.drafters.size;
    fill(this.legend, ...named.flat(), drafted ? "Which tokens were drafted is not told for this method; the figures are of the whole run." : "");
  }
}

/** @param {Summary} summary @param {Run} run @param {Run | null} plain @returns {[string, string][]} */
export function figuresOf(summary, run, plain) {
  const count = (/** @type {number | null} */ value) => (value === null ? "–" : value.toLocaleString("en"));
  /** @type {[string, string][]} */
  const figures = [
    ["Tokens", count(summary.completionTokens)],
    ["Seconds", summary.seconds.toFixed(2)],
    ["First token", summary.firstAt === null ? "–" : `${summary.firstAt.toFixed(2)} s`],
    ["Tokens a second", summary.tokensPerSecond === null ? "–" : rateText(summary.tokensPerSecond)],
    ["Prompt", count(summary.promptTokens)],
    ["Reused", count(summary.cachedTokens)],
  ];
  if (summary.numBranches) figures.push(["Branches", count(summary.numBranches)]);
  if (summary.steps) figures.push(["Tokens a step", (summary.tokensPerStep ?? 1).toFixed(2)]);
  if (summary.drafted) figures.push(["Drafts accepted", `${Math.round((100 * summary.accepted) / summary.drafted)} %`]);
  if (run.isOver && !run.record.plainOf) figures.push(["Against plain", plain ? savings(run, plain) : "not run"]);
  return figures;
}

/** Two runs in one line, and figure by figure. @param {Run} one @param {Run} other */
export function comparison(one, other) {
  const parts = glance(one, other).map((part) => el("span", { dir: "auto" }, part));
  return el(
    "div",
    {},
    el("p", { class: "glance" }, el("strong", {}, `${one.method} against ${other.method}`), parts),
    el("details", {}, el("summary", {}, "Figure by figure"), comparisonTable(one, other)),
  );
}

/** @param {Run} one @param {Run} other */
function comparisonTable(one, other) {
  const [a, b] = [summarize(one), summarize(other)];
  const number = (/** @type {number | null} */ value, digits = 0) => (value === null ? "–" : value.toFixed(digits));
  const change = (/** @type {number | null} */ x, /** @type {number | null} */ y) => (x === null || y === null || !y ? "" : x === y ? "0 %" : `${x <= y ? "−" : "+"}${Math.abs(100 * (1 - x / y)).toFixed(0)} %`);
  const answer = (/** @type {Run} */ run) => {
    const cell = el("td", { class: "answer-cell", dir: "auto" });
    new TextView(cell).append(run.answer.slice(-200));
    return cell;
  };
  /** @type {[string, number | null, number | null, number][]} */
  const rows = [
    ["Tokens", a.completionTokens, b.completionTokens, 0],
    ["Seconds", a.seconds, b.seconds, 2],
    ["Seconds to the first token", a.firstAt, b.firstAt, 2],
    ["Tokens a second", a.tokensPerSecond, b.tokensPerSecond, 1],
    ["Prompt tokens reused", a.cachedTokens, b.cachedTokens, 0],
    ["Branches", a.numBranches, b.numBranches, 0],
    ["Tokens a step", a.tokensPerStep, b.tokensPerStep, 2],
  ];
  return el(
    "table",
    { class: "comparison" },
    el("caption", {}, "Two runs compared; the change is of the first against the second"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Figure"), el("th", { scope: "col" }, one.method), el("th", { scope: "col" }, other.method), el("th", { scope: "col" }, "Change"))),
    el(
      "tbody",
      {},
      rows.map(([name, x, y, digits]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, number(x, digits)), el("td", {}, number(y, digits)), el("td", {}, change(x, y)))),
      el("tr", {}, el("th", { scope: "row" }, "Answer ends"), answer(one), answer(other), el("td", {}, one.answer.trim() === other.answer.trim() ? "the same text" : "another text")),
    ),
  );
}
