// What a run adds up to, and how two runs differ, in figures and in words.

import { short } from "./text.js";

/** @typedef {import("./run.js").Run} Run */

/** Characters at the end of a text in which its answer is looked for. */
const MAX_READ = 4000;

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
  const completionTokens = usage.completion_tokens ?? streamed;
  const first = firstPiece(run);
  return {
    status: run.status,
    method: run.method,
    seconds: run.seconds,
    firstAt: first?.at ?? null,
    tokensPerSecond: rate(completionTokens, run.seconds, first),
    promptTokens: usage.prompt_tokens ?? null,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? null,
    completionTokens,
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

/** The first text of a run. @param {Run} run @returns {import("./run.js").Piece | null} */
function firstPiece(run) {
  const firsts = [...run.branches.values()].flatMap((lane) => lane.pieces.slice(0, 1));
  return firsts.reduce((/** @type {any} */ first, piece) => (first && first.at <= piece.at ? first : piece), null);
}

/** Tokens a second of all that was generated, without the time to the first; null: there are too few. @param {number} tokens @param {number} seconds @param {{at: number, numTokens: number} | null} first */
function rate(tokens, seconds, first) {
  const [num, time] = first ? [tokens - first.numTokens, seconds - first.at] : [tokens, seconds];
  return num > 0 && time > 0 ? num / time : null;
}

/** @param {number} tokensPerSecond */
export function rateText(tokensPerSecond) {
  return tokensPerSecond.toFixed(tokensPerSecond < 10 ? 1 : 0);
}

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
  const many = times(of - saved, of);
  if (many) return `${many.replace("much", unit === "s" ? "long" : "many " + unit)}`;
  const share = of ? ` (${Math.round((Math.abs(saved) / of) * 100)} %)` : "";
  return `${Math.abs(saved).toFixed(digits)} ${unit}${share} ${saved >= 0 ? "less" : "more"}`;
}

/**
 * Two runs in one line: tokens, seconds and answers of the first against the second.
 * @param {Run} one
 * @param {Run} other
 * @returns {string[]} its parts
 */
export function glance(one, other) {
  const [a, b] = [summarize(one), summarize(other)];
  const [mine, theirs] = [finalAnswer(one), finalAnswer(other)];
  const answers = mine === theirs ? `both answer ${mine || "nothing"}` : `answers ${mine || "nothing"} against ${theirs || "nothing"}`;
  const tokens = `${a.completionTokens.toLocaleString("en")} against ${b.completionTokens.toLocaleString("en")} tokens`;
  return [
    `${tokens}${change(a.completionTokens, b.completionTokens)}`,
    `${a.seconds.toFixed(2)} against ${b.seconds.toFixed(2)} s${change(a.seconds, b.seconds)}`,
    answers,
  ];
}

/** @param {number} value @param {number} against */
function change(value, against) {
  if (!against) return "";
  const share = Math.round(100 * Math.abs(1 - value / against));
  const many = times(value, against);
  if (many) return ` (${many})`;
  return share ? ` (${share} % ${value < against ? "less" : "more"})` : " (as many)";
}

/** How many times as much it is, from twice on; null: less. @param {number} value @param {number} against */
function times(value, against) {
  return against && value >= 2 * against ? `${(value / against).toFixed(1)} times as much` : null;
}

/** The answer in a few characters: what won the vote, what stands in a box, or the last line. @param {Run} run */
export function finalAnswer(run) {
  const end = run.answer.slice(-MAX_READ);
  const winner = [...run.polls.values()].find((poll) => poll.branch === "" && poll.winner !== null)?.winner;
  const boxed = [...end.matchAll(/\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}/g)].pop()?.[1];
  const lines = end.split("\n").filter((line) => line.trim());
  return short(winner ?? boxed ?? lines[lines.length - 1] ?? "", 60);
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
  const rate = `${drafter}: ${accepted.toLocaleString("en")} of ${drafted.toLocaleString("en")} draft tokens accepted, ${tokensPerStep?.toFixed(2)} tokens a step.`;
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
