// The votes for each answer as bars that grow.

import { el, fill } from "./dom.js";
import { short } from "./text.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./poll.js").Poll} Poll
 */

/** Answers that have a bar of their own; the others share one. */
const MAX_BARS = 8;
const MAX_POLLS = 4;

/** The polls of a run that are shown: its votes, or where there are none those of its probes if one chain has them all. @param {Run} run */
export function shownPolls(run) {
  const polls = [...run.polls.values()];
  const votes = polls.filter((poll) => poll.kind === "votes");
  const shown = votes.length || polls.length > 1 ? votes : polls;
  const depth = (/** @type {Poll} */ poll) => (poll.branch ? poll.branch.split(".").length : 0);
  const outermost = Math.min(...shown.map(depth));
  return shown.filter((poll) => poll.tally.size && depth(poll) === outermost).slice(0, MAX_POLLS);
}

/** Who leads, in a few words; empty where nothing is voted on. @param {Run} run */
export function standing(run) {
  const [poll] = shownPolls(run);
  if (!poll?.leader) return "";
  const [answer, votes] = poll.leader;
  const total = poll.ranking.reduce((sum, [, count]) => sum + count, 0);
  if (poll.kind === "probes") return poll.isOver ? `ended with ${short(answer, 40)}` : "";
  const verb = poll.isOver ? "has won" : "leads";
  return `${short(answer, 40)} ${verb} (${amount(votes)} of ${amount(total)})`;
}

/** Shows the polls of a run. */
export class VotesView {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.shown = "";
    this.element = el("section", { class: "votes", hidden: true, "aria-label": "Votes" });
  }

  update() {
    const polls = shownPolls(this.run);
    const state = JSON.stringify(polls.map((poll) => [poll.branch, poll.isOver, ...poll.ranking]));
    if (state === this.shown) return;
    this.shown = state;
    this.element.hidden = !polls.length;
    fill(this.element, polls.map((poll) => this.section(poll)));
  }

  /** @private @param {Poll} poll */
  section(poll) {
    const of = poll.branch ? ` of ${this.run.branches.get(poll.branch)?.name ?? poll.branch}` : "";
    const title = poll.kind === "probes" ? "Answers of the probes" : "Votes";
    const rows = poll.ranking;
    const rest = rows.slice(MAX_BARS);
    const bars = rows.slice(0, MAX_BARS).map((row) => this.bar(poll, ...row));
    if (rest.length) {
      const [votes, share] = [rest.reduce((sum, row) => sum + row[1], 0), rest.reduce((sum, row) => sum + row[2], 0)];
      bars.push(bar(`${rest.length} other answers`, votes, share, "", ""));
    }
    return el("div", {}, el("h3", {}, title + of), el("ul", {}, bars), el("p", { class: "small" }, this.resultText(poll)));
  }

  /** @private @param {Poll} poll @param {string} answer @param {number} votes @param {number} share */
  bar(poll, answer, votes, share) {
    const names = [...poll.voters].filter(([, vote]) => vote === answer).map(([path]) => this.run.branches.get(path)?.name ?? path);
    const leads = answer === poll.leader?.[0] && poll.kind === "votes" ? "leads" : "";
    const state = answer === poll.winner ? "won" : leads;
    return bar(short(answer, 60), votes, share, names.join(", "), state);
  }

  /** @private @param {Poll} poll */
  resultText(poll) {
    if (poll.kind === "probes") return poll.winner === null ? "" : `The thought ends with ${short(poll.winner, 60)}${poll.why && `: ${short(poll.why, 120)}`}.`;
    if (!poll.isOver) return this.run.isOver ? "The vote has not ended." : "More samples may vote.";
    if (poll.winner === null) return "The vote has no winner.";
    const path = poll.winningBranch;
    const from = path ? `; its text is that of ${this.run.branches.get(path)?.name ?? path}` : "";
    return `The answer is ${short(poll.winner, 60)}${from}.`;
  }
}

/** @param {string} answer @param {number} votes @param {number} share @param {string} voters @param {string} state "won", "leads" or empty */
function bar(answer, votes, share, voters, state) {
  const length = el("span", { class: "length" });
  length.style.width = `${(100 * share).toFixed(1)}%`;
  return el(
    "li",
    { "data-state": state || null, title: voters || null },
    el("span", { class: "vote-answer", dir: "auto" }, answer, state && el("span", { class: "hidden" }, ` (${state})`)),
    el("span", { class: "track", "aria-hidden": "true" }, length),
    el("span", { class: "vote-count" }, `${amount(votes)} · ${Math.round(100 * share)} %`),
  );
}

/** @param {number} votes */
function amount(votes) {
  return Number.isInteger(votes) ? String(votes) : votes.toFixed(2);
}
