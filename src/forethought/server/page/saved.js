// Runs and chats of files, which may be anybody's: what has another form than the page writes is none.

import { replay } from "./run.js";
import { visible } from "./text.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").RunRecord} RunRecord
 * @typedef {import("./run.js").RunEvent} RunEvent
 * @typedef {import("./store.js").Conversation} Conversation
 * @typedef {import("./store.js").Turn} Turn
 * @typedef {import("./composer.js").Settings} Settings
 * @typedef {(value: any) => boolean} Check
 */

const MAX_TURNS = 10_000;

/** @type {Check} */
const isText = (value) => typeof value === "string";
/** @type {Check} */
const isNumber = (value) => Number.isFinite(value);
/** @type {Check} */
const isFlag = (value) => typeof value === "boolean";
/** @type {Check} */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
/** @param {Check} check @returns {Check} */
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
/** @param {Check} check @returns {Check} whose value may be missing */
const maybe = (check) => (value) => value === undefined || value === null || check(value);
/** @param {Record<string, Check>} checks by field @returns {Check} */
const form = (checks) => (value) => isObject(value) && Object.entries(checks).every(([field, check]) => check(value[field]));
/** @param {Check} check @returns {Check} */
const mapOf = (check) => (value) => isObject(value) && Object.values(value).every(check);

/** @type {Check} */
const isDraft = (span) => Array.isArray(span) && isNumber(span[0]) && isNumber(span[1]) && isFlag(span[2]) && isText(span[3]) && maybe(isText)(span[4]);
const isCall = form({ index: maybe(isNumber), id: maybe(isText), function: maybe(form({ name: maybe(isText), arguments: maybe(isText) })) });
const isUsage = form({ prompt_tokens: maybe(isNumber), completion_tokens: maybe(isNumber), prompt_tokens_details: maybe(form({ cached_tokens: maybe(isNumber) })), completion_tokens_details: maybe(form({ reasoning_tokens: maybe(isNumber) })) });
const isSpeculation = form({ drafter: maybe(isText), reason: maybe(isText), steps: maybe(isNumber), drafted: maybe(isNumber), accepted: maybe(isNumber), accepted_by_position: maybe(listOf(isNumber)) });
const isEvent = form({
  type: isText,
  at: maybe(isNumber),
  branch: maybe(isText),
  text: maybe(isText),
  reasoning: maybe(isText),
  num_tokens: maybe(isNumber),
  drafts: maybe(listOf(isDraft)),
  name: maybe(isText),
  why: maybe(isText),
  fields: maybe(isObject),
  calls: maybe(listOf(isCall)),
  index: maybe(isNumber),
  result: maybe(isText),
  seconds: maybe(isNumber),
  usage: maybe(isUsage),
  spent: maybe(isUsage),
  number: maybe(isNumber),
  speculation: maybe(isSpeculation),
  finish_reason: maybe(isText),
  message: maybe(isText),
});
const isRequest = form({
  model: maybe(isText),
  messages: listOf(form({ role: isText, content: isText })),
  method: maybe(isText),
  method_params: maybe(isObject),
  budget: maybe(mapOf(isNumber)),
  speculation: maybe(isObject),
  tools: maybe(listOf(isObject)),
});
const isRecord = form({ id: isText, created: isNumber, request: isRequest, conversation: maybe(isText), turn: maybe(isText), begun: maybe(isText), plainOf: maybe(isText) });
const isTurn = form({ id: isText, parent: maybe(isText), question: isText, runs: listOf(isText), created: maybe(isNumber), begun: maybe(isText), files: maybe(listOf(form({ name: isText, text: isText }))) });
const isConversation = form({ turns: listOf(isTurn), active: mapOf(isText), title: maybe(isText), created: maybe(isNumber) });
const isSettings = form({ fields: maybe(mapOf(isText)), parameters: maybe(mapOf(isText)), sampling: maybe(mapOf(isText)), plain: maybe(isFlag), tools: maybe(isFlag) });

/** The settings of a file; null: it holds none. @param {any} value @returns {Settings | null} */
export function settingsOf(value) {
  return isSettings(value) ? value : null;
}

/** A run of a file; null: it is none. @param {any} record @param {any} events @returns {Run | null} */
export function runOf(record, events) {
  if (!isRecord(record) || !listOf(isEvent)(events)) return null;
  const { id, created, request, conversation, turn, begun, plainOf } = record;
  const run = replay({ id, created, request, conversation, turn, begun, plainOf }, events);
  if (!run.isOver) run.apply({ type: "interrupted", at: run.lastAt });
  return run;
}

/** A conversation of a file, whose turns are a tree; null: it is none. @param {any} value @returns {Conversation | null} */
export function conversationOf(value) {
  if (!isConversation(value) || value.turns.length > MAX_TURNS) return null;
  const before = new Set([null]);
  for (const { id, parent = null } of value.turns) {
    if (before.has(id) || !before.has(parent)) return null;
    before.add(id);
  }
  const turns = value.turns.map(turnOf);
  const { id, title, active, settings } = value;
  return { id, title: title ? visible(title) : undefined, created: value.created ?? 0, turns, active, settings: settingsOf(settings) ?? undefined };
}

/** @param {any} turn @returns {Turn} */
function turnOf({ id, parent = null, question, runs, created, begun, files }) {
  const named = files?.map((/** @type {{name: string, text: string}} */ { name, text }) => ({ name: visible(name), text }));
  return { id, parent, question, runs, created: created ?? 0, ...(isText(begun) && { begun }), ...(named && { files: named }) };
}
