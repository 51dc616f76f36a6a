// Calls of tools: how a run goes on after them, and how they are shown.

import { el, fill } from "./dom.js";
import { post } from "./stream.js";
import { TextView, short } from "./text.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").RunEvent} RunEvent
 *
 * @typedef {object} Call of a tool
 * @property {number} round of the run
 * @property {number} index in its round
 * @property {string} id
 * @property {string} name
 * @property {string} args JSON
 * @property {string | null} result null: there is none yet
 * @property {boolean} isError
 * @property {number | null} seconds
 */

/** Rounds of calls; then the answer is asked for without tools. */
export const MAX_ROUNDS = 8;

/** Takes in a piece of calls, as the server streams them. @param {Call[]} calls @param {number} round @param {any[]} pieces */
export function grow(calls, round, pieces) {
  for (const { index = 0, id, function: called = {} } of pieces) {
    let call = calls.find((other) => other.round === round && other.index === index);
    if (!call) {
      call = { round, index, id: String(id ?? `call-${round}-${index}`), name: "", args: "", result: null, isError: false, seconds: null };
      calls.push(call);
    }
    call.name += called.name ?? "";
    call.args += called.arguments ?? "";
  }
}

/**
 * Runs the calls of a round, all at once.
 * @param {Call[]} calls
 * @param {AbortSignal} signal ends them
 * @param {(event: RunEvent) => void} take gets `called` events
 */
export async function runCalls(calls, signal, take) {
  await Promise.all(calls.map(async ({ index, name, args }) => take({ type: "called", index, ...(await outcome(name, args, signal)) })));
}

/** @param {string} name @param {string} args @param {AbortSignal} signal */
async function outcome(name, args, signal) {
  const began = performance.now();
  try {
    return await post("v1/tools/call", { name, arguments: args }, signal);
  } catch (error) {
    signal.throwIfAborted();
    return { result: `Error: ${error instanceof Error ? error.message : error}`, is_error: true, seconds: (performance.now() - began) / 1000 };
  }
}

/** The messages of a round: the model's with its calls, and their results. @param {string} text @param {Call[]} calls */
export function messagesOf(text, calls) {
  const called = calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args || "{}" } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: text, tool_calls: called }, ...results];
}

/** Shows the calls of a run, folded. */
export class CallsView {
  constructor() {
    this.element = el("ul", { class: "calls", "aria-label": "Calls of tools", hidden: true });
    this.shown = "";
  }

  /** @param {Run} run */
  update(run) {
    const state = JSON.stringify([run.calls, run.isOver]);
    if (state === this.shown) return;
    this.shown = state;
    const open = new Set([...this.element.querySelectorAll("details")].flatMap((details, number) => (details.open ? [number] : [])));
    this.element.hidden = !run.calls.length;
    fill(this.element, run.calls.map((call, number) => el("li", {}, folded(call, run.isOver, open.has(number)))));
  }
}

/** @param {Call} call @param {boolean} isOver whether the run is @param {boolean} isOpen */
function folded(call, isOver, isOpen) {
  const { name, args, result, isError, seconds } = call;
  const isRunning = result === null && !isOver;
  const state = result === null ? (isOver ? "has no result" : "running") : `${isError ? "failed, " : ""}${(seconds ?? 0).toFixed(2)} s`;
  const head = el("summary", {}, el("code", {}, `${short(name, 60)}(${short(args, 60)})`), " ", isRunning && el("span", { class: "spinner", "aria-hidden": "true" }), el("span", { class: isError ? "bad" : "" }, state));
  return el("details", { open: isOpen }, head, part("Arguments", indented(args)), result !== null && part(isError ? "Error" : "Result", result));
}

/** @param {string} title @param {string} text */
function part(title, text) {
  const said = el("div", { class: "said", tabindex: "0", role: "region", "aria-label": title });
  new TextView(said).append(text);
  return [el("h4", {}, title), said];
}

/** @param {string} json */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
