// Showing what a model wrote: as text, with its control characters made visible, in bounded size.

/** Characters of a text that are laid out before the rest has to be asked for. */
const MAX_SHOWN = 60_000;
/** Characters of a line without an end after which another block begins, where a word ends. */
const MAX_BLOCK = 1000;

const BIDI_NAMES = new Map([
  ["\u061c", "ALM"], ["\u200e", "LRM"], ["\u200f", "RLM"],
  ["\u202a", "LRE"], ["\u202b", "RLE"], ["\u202c", "PDF"], ["\u202d", "LRO"], ["\u202e", "RLO"],
  ["\u2066", "LRI"], ["\u2067", "RLI"], ["\u2068", "FSI"], ["\u2069", "PDI"],
]);
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/**
 * A text in which control characters and changes of direction are symbols: ESC is shown as "␛",
 * a right-to-left override as "⟨RLO⟩". Newlines and tabs stay.
 * @param {string} text
 * @returns {string}
 */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const name = BIDI_NAMES.get(character);
    if (name) return `⟨${name}⟩`;
    const code = character.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : "\ufffd";
  });
}

/** One line of at most `width` characters. @param {unknown} value @param {number} [width] */
export function short(value, width = 80) {
  const text = typeof value === "string" ? value : JSON.stringify(value) ?? "";
  const line = visible(text.slice(0, 4 * width)).replace(/\s+/g, " ").trim();
  return line.length < text.length || line.length > width ? `${line.slice(0, width - 1)}…` : line;
}

/**
 * A text that grows. Only the first part of a very long one is laid out; a button shows the rest.
 *
 * Each line is a block of its own, so that the browser lays out the last line when it grows, and
 * not the whole text.
 */
export class TextView {
  /** @param {HTMLElement} element shows it */
  constructor(element) {
    this.element = element;
    /** @type {string[]} */
    this.held = [];
    this.numShown = 0;
    this.numHeld = 0;
    this.showAll = false;
    /** @type {HTMLButtonElement | null} */
    this.note = null;
    /** @type {Text | null} */
    this.last = null;
    /** @type {HTMLElement | null} */
    this.block = null;
    this.blockSize = 0;
  }

  clear() {
    this.held = [];
    this.numShown = this.numHeld = 0;
    this.showAll = false;
    this.note = this.last = this.block = null;
    this.element.replaceChildren();
  }

  /**
   * @param {string} text
   * @param {string} [className] of a span around it; none: plain text
   * @param {string} [title] shown on hover
   */
  append(text, className = "", title = "") {
    if (!text) return;
    const room = this.showAll ? text.length : Math.max(0, MAX_SHOWN - this.numShown);
    if (room > 0) this.show(text.slice(0, room), className, title);
    if (room < text.length) this.hold(text.slice(room));
  }

  /** @private @param {string} text @param {string} className @param {string} title */
  show(text, className, title) {
    this.numShown += text.length;
    for (const part of visible(text).match(/[^\n]*\n|[^\n]+$/g) ?? []) {
      if (!this.block) this.begin();
      this.put(part, className, title);
      this.blockSize += part.length;
      const isLong = this.blockSize > MAX_BLOCK && (/\s$/.test(part) || this.blockSize > 4 * MAX_BLOCK);
      if (part.endsWith("\n") || isLong) this.block = null;
    }
  }

  /** @private */
  begin() {
    this.block = document.createElement("div");
    this.blockSize = 0;
    this.last = null;
    this.element.insertBefore(this.block, this.note);
  }

  /** @private @param {string} text @param {string} className @param {string} title */
  put(text, className, title) {
    if (!className && this.last) {
      this.last.appendData(text);
      return;
    }
    const node = document.createTextNode(text);
    this.last = className ? null : node;
    if (!className) {
      this.block?.append(node);
      return;
    }
    const span = document.createElement("span");
    span.className = className;
    if (title) span.title = title;
    span.append(node);
    this.block?.append(span);
  }

  /** @private @param {string} text */
  hold(text) {
    this.held.push(text);
    this.numHeld += text.length;
    if (!this.note) {
      this.note = document.createElement("button");
      this.note.type = "button";
      this.note.className = "more";
      this.note.addEventListener("click", () => this.release());
      this.element.append(this.note);
    }
    this.note.textContent = `Show ${this.numHeld.toLocaleString("en")} more characters`;
  }

  /** @private */
  release() {
    const text = this.held.join("");
    this.held = [];
    this.numHeld = 0;
    this.showAll = true;
    this.note?.remove();
    this.note = null;
    this.show(text, "", "");
  }
}
