// Settings of methods and of sampling as fields, made of the JSON schemas that the server gives.

import { el } from "./dom.js";

/**
 * @typedef {{name: string, default: any, required?: boolean, description?: string, schema?: Schema}} Parameter
 * @typedef {{type?: string | string[], enum?: any[], const?: any, minimum?: number, maximum?: number, anyOf?: Schema[]}} Schema
 */

/** @param {Parameter} parameter @param {string} prefix of the id of its explanation @returns {HTMLElement} */
export function parameterField(parameter, prefix) {
  const { name, description } = parameter;
  const id = `${prefix}-${name}-help`;
  const input = fieldOf(parameter);
  if (description) input.setAttribute("aria-describedby", id);
  const needed = parameter.required && el("span", { class: "needed" }, " needed");
  return el("div", {}, el("label", {}, el("span", {}, name, needed), input), description && el("p", { class: "muted small", id }, description));
}

/** @param {Parameter} parameter */
function fieldOf({ name, default: standard, required, schema = {} }) {
  const shown = standard === null || standard === undefined ? (required ? "" : "none") : typeof standard === "string" && standard.trim() ? standard : JSON.stringify(standard);
  const kinds = (schema.anyOf ?? [schema]).filter((kind) => kind.type !== "null");
  const choices = typeof standard === "boolean" ? [true, false] : kinds.flatMap((kind) => kind.enum ?? []);
  if (choices.length && kinds.length <= 1) {
    const options = choices.filter((choice) => choice !== standard).map((choice) => el("option", { value: String(choice) }, String(choice)));
    return el("select", { name }, el("option", { value: "" }, shown), options);
  }
  const isText = kinds.some((kind) => kind.type === "string") && !kinds.some((kind) => ["integer", "number", "boolean"].includes(String(kind.type)));
  const attributes = { name, required, "data-kind": isText ? "text" : null, placeholder: shown.slice(0, 60), autocomplete: "off" };
  const isNumber = kinds.length === 1 && ["integer", "number"].includes(String(kinds[0].type));
  if (!isNumber) return el("input", { ...attributes, type: "text" });
  const { type, minimum, maximum } = kinds[0];
  return el("input", { ...attributes, type: "number", min: minimum, max: maximum, step: type === "integer" ? 1 : "any" });
}

/** What was entered in the fields of an element, by name. @param {Element} container @returns {Record<string, any>} */
export function enteredIn(container) {
  /** @type {Record<string, any>} */
  const values = {};
  for (const input of /** @type {NodeListOf<HTMLInputElement>} */ (container.querySelectorAll("input, select"))) {
    const text = input.value.trim();
    if (text !== "") values[input.name] = valueOf(text, input.dataset.kind === "text");
  }
  return values;
}

/** The text in each field of an element that has one, by name. @param {Element} container @returns {Record<string, string>} */
export function textsIn(container) {
  const inputs = [.../** @type {NodeListOf<HTMLInputElement>} */ (container.querySelectorAll("input, select"))];
  return Object.fromEntries(inputs.filter((input) => input.value !== "").map((input) => [input.name, input.value]));
}

/** Writes texts into the fields of an element; a field without one is emptied. @param {Element} container @param {Record<string, string>} texts by name */
export function enter(container, texts) {
  for (const input of /** @type {NodeListOf<HTMLInputElement>} */ (container.querySelectorAll("input, select"))) input.value = texts[input.name] ?? "";
}

/** JSON where the text is JSON, and else the text. @param {string} text @param {boolean} isText whether a number stays as it was written */
function valueOf(text, isText) {
  try {
    const value = JSON.parse(text);
    return isText && (typeof value !== "object" || value === null) && typeof value !== "string" ? text : value;
  } catch {
    return text;
  }
}
