// What a method decided, in words.

import { short } from "./text.js";

/** @typedef {import("./run.js").Stage} Stage */

/** Values of a list that are told. */
const MAX_LISTED = 8;
/** Names of stages by which a method ends early. */
const EXITS = new Set(["early_exit", "stopped"]);

/** What a mark on a lane stands for. @param {Stage} stage */
export function kindOf(stage) {
  if (EXITS.has(stage.name)) return "exit";
  if (["probed", "scored", "pruned", "voted", "selected"].includes(stage.name)) return stage.name;
  return "other";
}

/** What stands beside a mark. @param {Stage} stage */
export function labelOf(stage) {
  const { answer, score, accepted } = stage.fields;
  const kind = kindOf(stage);
  if (kind === "exit") return stage.name.replace("_", " ");
  if (kind === "pruned" || kind === "selected") return "";
  if (typeof accepted === "boolean") return accepted ? "accepted" : "rejected";
  if (typeof score === "number") return number(score);
  return answer === undefined || answer === null || answer === "" ? "" : short(answer, 16);
}

/** A stage as a sentence about its branch. @param {Stage} stage @returns {string} */
export function describe(stage) {
  if (stage.name === "voted" && stage.isEnd) return resultText(stage.fields);
  const words = Object.hasOwn(SENTENCES, stage.name) ? SENTENCES[stage.name](stage.fields, short(stage.why, 120)) : undefined;
  return words ?? otherwise(stage);
}

/** @type {Record<string, (fields: Record<string, any>, why: string) => string | undefined>} */
const SENTENCES = {
  probed: ({ answer, at, agreeing, difficulty, sample, score }) => {
    if (sample !== undefined) return `after ${tokens(at)}, the model finds it good with probability ${number(score)}`;
    if (difficulty !== undefined) return `the question has difficulty ${number(difficulty)}; its probes answer ${quoted(answer)}`;
    if (answer === undefined) return undefined;
    const agree = agreeing > 1 ? `; ${agreeing} probes in a row agree` : "";
    return `a probe${at === undefined ? "" : ` after ${tokens(at)}`} ${answer ? `answers ${quoted(answer)}` : "has no answer yet"}${agree}`;
  },
  early_exit: ({ answer, at, marker }, why) => {
    if (marker !== undefined) return `has stated an answer after ${tokens(at)} (${quoted(marker)}): the thought is closed`;
    return `ends early with ${quoted(answer)}${because(why)}; ${tokens(at)} are kept`;
  },
  scored: scored,
  pruned: ({ answer, winner, beam, sample, score, critique, threshold }, why) => {
    if (winner !== undefined) return `answer ${answer} loses against answer ${winner}${because(why)}`;
    if (critique !== undefined) return `critique ${critique} does not count${because(why)}`;
    if (threshold !== undefined) return `is stopped: its confidence ${number(score)} is below ${number(threshold)}`;
    const what = beam || sample !== undefined || score !== undefined ? "is pruned" : "is left out";
    return `${what}${typeof score === "number" ? ` with score ${number(score)}` : ""}${because(why)}`;
  },
  voted: ({ answer, tally, weight }) => {
    if (weight !== undefined) return `votes for ${quoted(answer)} with weight ${number(weight)}`;
    const [votes, total] = [tally?.[answer], sum(tally)];
    return votes === undefined ? `votes for ${quoted(answer)}` : `votes for ${quoted(answer)}, which has ${number(votes)} of ${number(total)} votes now`;
  },
  selected: ({ answer, end, method, score }, why) => {
    if (method !== undefined) return `the policy chooses ${method}`;
    if (end !== undefined) return `answer ${answer} is returned (${String(end).replaceAll("_", " ")})`;
    return `is chosen${typeof score === "number" ? ` with score ${number(score)}` : ""}${because(why)}`;
  },
  forked: ({ at, confidence }, why) => `is forked after ${tokens(at)}, confidence ${number(confidence)}${because(why)}`,
  prolonged: ({ at, waits }) => `would have ended its thought after ${tokens(at)} and goes on (${waits}${ordinal(waits)} time)`,
  forced: ({ at, queries }, why) => (queries === undefined ? `the thought ends after ${tokens(at)}${because(why)}` : `has to answer now, after ${count(queries, "query", "queries")}${because(why)}`),
  retrieved: ({ query, documents }) => `finds ${documents?.length === 1 ? "document" : "documents"} ${listed(documents)} for ${quoted(query)}`,
  thought: ({ sleep_tokens: size }) => `thoughts about the context: ${tokens(size)}`,
  spawned: ({ threads }) => (threads === undefined ? undefined : `spawns ${count(threads, "thread", "threads")}`),
  joined: ({ threads }) => `${threads === 1 ? "its thread has" : `all ${threads} threads have`} ended and are joined`,
  exchanged: ({ turn }) => `turn ${turn} is over: the workers read each other`,
  called: ({ args, result, is_error: isError }, why) => (args === undefined && result === undefined ? undefined : `calls ${why}(${short(args, 60)}): ${isError ? "error " : ""}${short(result, 80)}`),
  layer: ({ number: layer, types, candidates }) => `layer ${layer} (${listed(types)}) leaves ${count(candidates, "candidate", "candidates")}`,
};

/** @param {Record<string, any>} fields @returns {string | undefined} */
function scored({ answer, score, steps, accepted, step, critique, scores, finished, beam }) {
  if (critique !== undefined) return `critique ${critique} gives ${listed(scores)}`;
  if (step !== undefined) return `step ${step} of the small model has ${number(score)} and is ${accepted ? "kept" : "written again"}`;
  if (answer !== undefined && accepted !== undefined) return `answer ${answer} is ${accepted ? "accepted by the model" : "criticised and will be revised"}`;
  if (answer !== undefined) return `answer ${answer} is right with probability ${number(score)}`;
  if (accepted !== undefined) return accepted ? "is accepted by the verifier" : "is rejected by the verifier";
  if (score === undefined) return undefined;
  const value = typeof score === "number" ? `has score ${number(score)}` : "has no score";
  if (beam) return `${value}${finished ? ": a whole answer" : ""}`;
  return Array.isArray(steps) && steps.length > 1 ? `${value} (its steps ${listed(steps.map(number))})` : value;
}

/** The end of a vote. @param {Record<string, any>} fields */
function resultText({ answer, tally }) {
  if (answer === null || answer === undefined) return "the vote has no winner: there is no answer";
  const votes = tally?.[answer];
  return `the vote is over: ${quoted(answer)} has won${votes === undefined ? "" : ` with ${number(votes)} of ${number(sum(tally))} votes`}`;
}

/** @param {Record<string, number> | undefined} tally @returns {number} */
function sum(tally) {
  return Object.values(tally ?? {}).reduce((total, votes) => total + Number(votes), 0);
}

/** A stage of another method, by its name. @param {Stage} stage */
function otherwise({ name, why, fields }) {
  const values = Object.entries(fields).map(([field, value]) => `${field.replaceAll("_", " ")} ${short(value, 40)}`);
  return [name.replaceAll("_", " "), why && short(why, 90), values.join(", ")].filter(Boolean).join(": ");
}

/** At most two decimals, and never an empty number. @param {any} value */
function number(value) {
  if (typeof value !== "number") return short(value ?? "–", 20);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(2);
}

/** @param {any} value */
function quoted(value) {
  return value === null || value === undefined || value === "" ? "nothing" : short(value, 40);
}

/** @param {any} size */
function tokens(size) {
  return count(size, "token", "tokens");
}

/** @param {any} value @param {string} one @param {string} several */
function count(value, one, several) {
  return `${number(value)} ${value === 1 ? one : several}`;
}

/** @param {any} values */
function listed(values) {
  if (!Array.isArray(values) || !values.length) return "none";
  const rest = values.length > MAX_LISTED ? ` and ${values.length - MAX_LISTED} more` : "";
  return values.slice(0, MAX_LISTED).map((value) => short(value, 30)).join(", ") + rest;
}

/** @param {string} why */
function because(why) {
  return why ? `: ${why}` : "";
}

/** @param {number} value */
function ordinal(value) {
  return ["th", "st", "nd", "rd"][value] ?? "th";
}
