// Markdown and formulas: the server reads them (server/markdown.py), and elements are made here.

import { el, quietButton } from "./dom.js";
import { post } from "./stream.js";
import { TextView, visible } from "./text.js";

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
/** Characters of a text that is read; what is beyond, in one block, is shown as it was written. */
const MAX_CHARACTERS = 1 << 15;
/** Milliseconds between two readings of a text that grows. */
const INTERVAL = 250;
const LINE_END = /\r\n?|\n/g;
/** Blocks at the end of a text that may still change. */
const OPEN = 2;

/**
 * Shows a text that grows, as Markdown, in the place of an element that shows it plainly.
 *
 * Blocks that can change no more are settled: what comes is read from the first block after them,
 * so that a reading costs what is new, and of the elements only those are made that differ.
 */
export class MarkdownView {
  /** @param {HTMLElement} plain */
  constructor(plain) {
    this.plain = plain;
    this.blocks = el("div");
    this.rest = new TextView(el("div", { class: "said" }));
    this.element = el("div", { class: "markdown", dir: "auto", hidden: true }, this.blocks, this.rest.element);
    this.text = "";
    this.isOver = false;
    this.waits = false;
    this.shown = "";
    /** @type {string[]} the blocks that are shown, as JSON */
    this.known = [];
    this.numSettled = 0;
    /** Characters of the settled blocks. */
    this.settled = 0;
    /** Whether a block is too long, and what follows is shown as it was written. */
    this.isCut = false;
  }

  /** @param {string} text all of it @param {boolean} isOver whether it grows no more */
  show(text, isOver) {
    const isWhole = isOver && !this.isOver && this.settled > 0 && text.length <= MAX_CHARACTERS;
    this.text = text;
    this.isOver = isOver;
    if (!text.startsWith(this.shown)) this.hide();
    else if (isWhole) this.settled = this.numSettled = 0; // once more, with all links that it defines
    if (!this.waits && (text !== this.shown || isWhole)) void this.read();
  }

  /** @private */
  hide() {
    this.shown = "";
    this.known = [];
    this.settled = this.numSettled = 0;
    this.isCut = false;
    this.blocks.replaceChildren();
    this.rest.clear();
    this.element.hidden = true;
    this.plain.hidden = false;
  }

  /** @private */
  async read() {
    if (this.isCut) return this.showRest();
    const from = this.settled;
    const text = this.text.slice(0, from + MAX_CHARACTERS).replace(/[\ud800-\udbff]$/, "");
    const isPart = text.length < this.text.length;
    let goesOn = false;
    this.waits = true;
    try {
      const { nodes, lines } = await post("page/render", { text: text.slice(from) });
      goesOn = true;
      if (!this.text.startsWith(text) || this.settled !== from) return;
      this.place(nodes);
      this.shown = text;
      this.element.hidden = false;
      this.plain.hidden = true;
      if (!this.isOver || isPart) this.settle(text, lines);
      this.isCut = isPart && this.settled === from;
      if (!isPart) await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    } catch {
      this.hide(); // as it was written
      await new Promise((resolve) => setTimeout(resolve, 20 * INTERVAL));
    } finally {
      this.waits = false;
      if ((goesOn && this.shown !== this.text) || this.settled < from || !this.text.startsWith(text)) void this.read();
    }
  }

  /** @private */
  showRest() {
    this.rest.append(this.text.slice(this.shown.length));
    this.shown = this.text;
  }

  /** @private Shows nodes after the settled blocks. @param {Node[]} nodes */
  place(nodes) {
    const all = [...this.known.slice(0, this.numSettled), ...nodes.map((node) => JSON.stringify(node))];
    const shown = [...this.blocks.childNodes];
    nodes.forEach((node, number) => {
      const place = this.numSettled + number;
      if (all[place] === this.known[place]) return;
      const [fresh, old] = [made(node), shown[place]];
      if (!old) this.blocks.append(fresh);
      else {
        const left = scrolled(old)?.scrollLeft ?? 0;
        old.replaceWith(fresh);
        const box = scrolled(fresh);
        if (box) box.scrollLeft = left;
      }
    });
    for (const old of shown.slice(all.length)) old.remove();
    this.known = all;
  }

  /** @private Settles all but the last blocks. @param {string} text @param {number[]} lines at which the blocks after the settled ones begin */
  settle(text, lines) {
    const number = lines.length - OPEN;
    if (number < 1 || lines[number] === lines[number - 1]) return;
    const ends = [...text.slice(this.settled).matchAll(LINE_END)].map((end) => end.index + end[0].length);
    this.settled += ends[lines[number] - 1];
    this.numSettled += number;
  }
}

/** What is scrolled sideways in a block of code. @param {globalThis.Node} block */
function scrolled(block) {
  return block instanceof HTMLElement ? block.querySelector("pre") : null;
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
  const copy = copyButton(() => text.textContent ?? "");
  const head = el("div", { class: "row small muted" }, visible(language), el("span", { class: "spacer" }), copy);
  return el("div", { class: "code" }, head, el("pre", {}, text));
}

/** A button that copies a text. @param {() => string} text @param {string} [label] for screen readers */
export function copyButton(text, label) {
  const button = quietButton("Copy", () => void copied(button, text()), label);
  return button;
}

/** @param {HTMLButtonElement} button @param {string} text */
async function copied(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copiedBySelection(text) ? "Copied" : "Not allowed";
    button.focus();
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Copies where there is no clipboard, as on a page of another machine without TLS. @param {string} text */
function copiedBySelection(text) {
  const area = el("textarea", { class: "hidden", readonly: true, value: text });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}
