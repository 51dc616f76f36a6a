// What is shown before the first question: the model, questions to try, and what there is.

import { grouped, obstacle } from "./composer.js";
import { el, fill } from "./dom.js";

/**
 * @typedef {import("./composer.js").Method} Method
 * @typedef {import("./composer.js").Example} Example
 * @typedef {{id: string, max_model_len?: number | null}} Model
 */

/** Questions for servers that have none of their own. @type {Example[]} */
const EXAMPLES = [
  { title: "Probes of a chain of thought", prompt: "A train goes 120 km in 1.5 hours, and then 80 km in 1 hour. What is its average speed in km/h?", method: "dynasor" },
  { title: "Samples that vote", prompt: "How many times does the letter r occur in the word strawberry?", method: "majority_vote" },
  { title: "Plain decoding", prompt: "Explain in three sentences why the sky is blue.", method: "plain" },
];
const MAX_EXAMPLES = 6;

/** The first paint of a chat. */
export class Welcome {
  /** @param {{take: (example: Example) => void, choose: (method: Method) => void, refuse: (why: string) => void}} actions */
  constructor(actions) {
    this.actions = actions;
    this.element = el("div", { class: "welcome" }, el("h3", {}, "Ask a question"), el("p", { class: "muted" }, "Looking up what this server has …"));
  }

  /** @param {Model[]} models @param {Method[]} methods @param {Example[]} examples @param {string} drafter what drafts, in words */
  offer(models, methods, examples, drafter) {
    const own = examples.length ? examples : EXAMPLES;
    const able = methods.filter((method) => !obstacle(method));
    fill(
      this.element,
      el("h3", {}, "Ask a question"),
      el("p", {}, modelLine(models), ` ${able.length} of ${methods.length} methods run here. ${drafter}`),
      el("p", { class: "muted" }, "A method spends tokens to answer better, or saves them: the lanes show what it does. Nothing leaves this browser and the server."),
      el("h3", {}, "Questions to try"),
      el("div", { class: "cards" }, own.slice(0, MAX_EXAMPLES).map((example) => this.card(example, methods))),
      el("h3", {}, "Methods"),
      el("dl", { class: "groups" }, [...grouped(methods)].flatMap(([group, members]) => this.group(group, members))),
    );
  }

  /** Says why there is nothing. @param {string} why */
  fail(why) {
    fill(this.element, el("h3", {}, "Ask a question"), el("p", { class: "bad" }, why));
  }

  /** @private @param {Example} example @param {Method[]} methods */
  card(example, methods) {
    const method = methods.find(({ name, ...rest }) => name === example.method && !obstacle({ name, ...rest }));
    const note = method ? method.title || method.name : example.title;
    return el("button", { type: "button", class: "card", onclick: () => this.actions.take(example) }, el("span", { dir: "auto" }, example.prompt), el("span", { class: "muted small" }, note));
  }

  /** @private @param {string} group @param {Method[]} members */
  group(group, members) {
    return [el("dt", {}, group), el("dd", {}, members.map((method) => this.chip(method)))];
  }

  /** @private @param {Method} method */
  chip(method) {
    const why = obstacle(method);
    const text = method.title || method.name;
    if (why) return el("button", { type: "button", class: "chip off", title: why, "aria-disabled": "true", onclick: () => this.actions.refuse(`${text} does not run here: ${why}.`) }, text, el("span", { class: "hidden" }, ` (${why})`));
    return el("button", { type: "button", class: "chip", title: method.summary || null, onclick: () => this.actions.choose(method) }, text);
  }
}

/** @param {Model[]} models */
function modelLine(models) {
  const [first] = models;
  if (!first) return "This server names no model.";
  const length = first.max_model_len ? `, with a context of ${first.max_model_len.toLocaleString("en")} tokens` : "";
  return [el("strong", {}, first.id), ` answers${length}${models.length > 1 ? `, and ${models.length - 1} more` : ""}.`];
}
