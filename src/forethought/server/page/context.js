// How much of the model's context the conversation takes, counted by the server.

import { byId, fill } from "./dom.js";
import { post } from "./stream.js";

/**
 * @typedef {{role: string, content: string}} Message
 * @typedef {{function: {name: string, description?: string, parameters?: object}}} Tool
 *
 * @typedef {object} Contents what the context holds
 * @property {string} model
 * @property {Message[]} messages with the question that is being written
 * @property {Tool[]} tools
 */

/** Milliseconds after a change until it is counted. */
const WAIT = 400;
/** Characters beyond which a text that is being written is not sent to be counted. */
const MAX_COUNTED = 1 << 20;
/** The share of the context from which on what is left is told. */
const NARROW = 0.85;

/** Shows the tokens of a conversation of those that the model can read. */
export class ContextMeter {
  /** @param {() => Contents} contents of the context now */
  constructor(contents) {
    this.contents = contents;
    this.element = byId("context");
    this.length = byId("context-length");
    this.text = byId("context-text");
    /** @type {Map<string, number>} tokens of context by model */
    this.limits = new Map();
    this.numTokens = 0;
    /** Tokens of context of the model for which it was counted. */
    this.limit = 1;
    this.timer = 0;
    this.version = 0;
  }

  /** @param {{id: string, max_model_len?: number | null}[]} models */
  offer(models) {
    this.limits = new Map(models.flatMap(({ id, max_model_len: limit }) => (limit ? [[id, limit]] : [])));
    this.changed();
  }

  /** Counts anew, soon. */
  changed() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.count(), WAIT);
  }

  /** Shows tokens beside those that were counted: of an answer that is being written. @param {number} numTokens */
  grow(numTokens) {
    if (!this.element.hidden) this.show(this.numTokens + numTokens);
  }

  /** @private */
  async count() {
    const version = ++this.version;
    const contents = this.contents();
    const size = contents.messages.reduce((sum, { content }) => sum + content.length, 0);
    const limit = this.limits.get(contents.model);
    const isCounted = limit && size > 0 && size <= MAX_COUNTED;
    const numTokens = isCounted ? await counted(contents) : null;
    if (version !== this.version) return;
    this.element.hidden = numTokens === null;
    if (!limit || numTokens === null) return;
    this.limit = limit;
    this.numTokens = numTokens;
    this.show(numTokens);
  }

  /** @private @param {number} numTokens */
  show(numTokens) {
    const { limit } = this;
    const left = limit - numTokens;
    const told = left < 0 ? `: ${(-left).toLocaleString("en")} too many` : numTokens / limit > NARROW ? `: ${left.toLocaleString("en")} left for the answer` : "";
    this.length.style.width = `${Math.min(100, (100 * numTokens) / limit).toFixed(1)}%`;
    this.element.classList.toggle("narrow", numTokens / limit > NARROW);
    fill(this.text, `Context: ${numTokens.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens${told}`);
  }
}

/** Tokens of a conversation as the model reads it; null: this server cannot tell. @param {Contents} contents @returns {Promise<number | null>} */
async function counted({ model, messages, tools }) {
  const system = messages.filter(({ role }) => role === "system").map(({ content }) => content).join("\n");
  const others = messages.filter(({ role, content }) => role !== "system" && content);
  const offered = tools.map(({ function: { name, description, parameters } }) => ({ name, description, input_schema: parameters ?? { type: "object" } }));
  const body = { model, messages: others, ...(system && { system }), ...(offered.length && { tools: offered }) };
  try {
    return (await post("v1/messages/count_tokens", body)).input_tokens ?? null;
  } catch {
    return null;
  }
}
