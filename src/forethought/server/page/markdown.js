// Markdown and formulas: the server reads them (server/markdown.py), and elements are made here.

import { el, fill } from "./dom.js";
import { post } from "./stream.js";
import { visible } from "./text.js";

/**
 * @typedef {object} Element
 * @property {string} tag
 * @property {Record<string, string>} [attrs]
 * @property {Node[]} [children]
 *
 * @typedef {string | Element} Node
 */

const HTML = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "em", "strong", "s", "code", "hr", "table", "thead", "tbody", "tr", "th", "td"]);
const MATHML = new Set(["math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "ms", "msup", "msub", "msubsup", "mfrac", "msqrt", "mroot", "mover", "munder", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "mphantom", "menclose", "mmultiscripts", "mprescripts"]);
const ATTRIBUTES = new Set(["display", "mathvariant", "stretchy", "fence", "form", "separator", "accent", "accentunder", "linethickness", "displaystyle", "scriptlevel", "columnalign", "rowspacing", "columnspacing", "width", "height", "depth", "lspace", "rspace", "minsize", "maxsize", "movablelimits", "notation", "largeop", "symmetric"]);
/** What a span of code is: each has a colour in style.css. */
const KINDS = new Set(["comment", "keyword", "string", "number", "name", "deleted", "inserted"]);
const MATH = "http://www.w3.org/1998/Math/MathML";
/** Characters of a text that is read; a longer one is shown as it was written. */
const MAX_CHARACTERS = 1 << 15;
/** Milliseconds between two readings of a text that grows. */
const INTERVAL = 250;

/** Shows a text that grows, as Markdown, in the place of an element that shows it plainly. */
export class MarkdownView {
  /** @param {HTMLElement} plain */
  constructor(plain) {
    this.plain = plain;
    this.element = el("div", { class: "markdown", dir: "auto", hidden: true });
    this.text = "";
    this.shown = "";
    this.waits = false;
  }

  /** @param {string} text all of it */
  show(text) {
    this.text = text;
    if (!text.startsWith(this.shown)) this.hide();
    if (!this.waits && text !== this.shown) void this.read();
  }

  /** @private */
  hide() {
    this.shown = "";
    this.element.hidden = true;
    this.plain.hidden = false;
  }

  /** @private */
  async read() {
    if (this.text.length > MAX_CHARACTERS) return this.hide();
    const text = this.text;
    this.waits = true;
    try {
      const { nodes } = await post("page/render", { text });
      if (!this.text.startsWith(text)) return;
      fill(this.element, nodes.map(made));
      this.shown = text;
      this.element.hidden = false;
      this.plain.hidden = true;
      await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    } catch {
      this.hide(); // as it was written
      await new Promise((resolve) => setTimeout(resolve, 20 * INTERVAL));
    } finally {
      this.waits = false;
      if (this.text !== text) void this.read();
    }
  }
}

/** @param {Node} node @returns {globalThis.Node} */
function made(node) {
  if (typeof node === "string") return document.createTextNode(visible(node));
  const { tag, attrs = {}, children = [] } = node;
  const inner = children.map(made);
  if (tag === "pre") return code(attrs.language ?? "", inner);
  if (tag === "a") return el("a", { href: attrs.href, target: "_blank", rel: "noopener noreferrer" }, inner);
  if (tag === "span" && KINDS.has(attrs.kind)) return el("span", { class: `code-${attrs.kind}` }, inner);
  if (HTML.has(tag)) {
    const element = document.createElement(tag);
    if (tag === "ol" && attrs.start) element.setAttribute("start", attrs.start);
    element.append(...inner);
    return element;
  }
  if (!MATHML.has(tag)) return el("span", {}, inner);
  const element = document.createElementNS(MATH, tag);
  for (const [name, value] of Object.entries(attrs)) if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
  element.append(...inner);
  return element;
}

/** @param {string} language @param {globalThis.Node[]} inner */
function code(language, inner) {
  const text = el("code", {}, inner);
  const copy = el("button", { type: "button", class: "quiet", onclick: () => copied(copy, text.textContent ?? "") }, "Copy");
  const head = el("div", { class: "row small muted" }, visible(language), el("span", { class: "spacer" }), copy);
  return el("div", { class: "code" }, head, el("pre", {}, text));
}

/** @param {HTMLButtonElement} button @param {string} text */
async function copied(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
