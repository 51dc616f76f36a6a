// Text files that go with a question: chosen, dropped, or pasted.

import { byId, el, fill } from "./dom.js";
import { TextView, visible } from "./text.js";

/** @typedef {{name: string, text: string}} Attachment */

const MAX_BYTES = 1 << 20;
const MAX_TOTAL = 4 << 20;
const MAX_FILES = 10;
const MAX_NAME = 120;
/** What is refused by its name, by its type or, where it has none, by the end of its name. */
const KINDS = [
  { type: /^image\/(?!svg)|\.(png|jpe?g|gif|webp|bmp|heic|avif)$/i, name: "an image" },
  { type: /^audio\/|\.(mp3|wav|ogg|flac|m4a)$/i, name: "an audio file" },
  { type: /^video\/(?!mp2t)|\.(mp4|mov|mkv|webm)$/i, name: "a video" },
  { type: /^application\/pdf$|\.pdf$/i, name: "a PDF" },
  { type: /officedocument|msword|ms-excel|ms-powerpoint|opendocument|\.(docx?|xlsx?|pptx?|od[tsp])$/i, name: "an office document" },
];
/** Characters of a pasted text that becomes a file. */
const LONG = 4000;

/** The files of the question that is written. */
export class Attachments {
  /** @param {(text: string) => void} say tells why a file is refused */
  constructor(say) {
    this.say = say;
    /** @type {Attachment[]} */
    this.files = [];
    this.list = byId("attachments");
    const input = byId("attach");
    input.addEventListener("change", async () => {
      await this.add([...input.files]);
      input.value = "";
    });
    byId("question").addEventListener("paste", (/** @type {ClipboardEvent} */ event) => this.onPaste(event));
    this.takeDrops(/** @type {HTMLElement} */ (document.querySelector(".talk")));
  }

  /** The files, which the next question does not have. @returns {Attachment[]} */
  take() {
    const files = this.files;
    this.files = [];
    this.show();
    return files;
  }

  /** @param {File[]} files */
  async add(files) {
    const refused = [];
    for (const file of files) {
      const why = await this.refusal(file);
      if (why) refused.push(`${shownName(file.name)} ${why}.`);
    }
    this.show();
    this.say(refused.join(" "));
  }

  /** @private Takes a file in, or says why not. @param {File} file @returns {Promise<string>} */
  async refusal(file) {
    const kind = KINDS.find(({ type }) => type.test(file.type || file.name));
    if (kind) return `is ${kind.name}: the models here read text alone`;
    if (file.size > MAX_BYTES) return `is larger than 1 MB`;
    if (this.files.length >= MAX_FILES) return `is one file too many: a question takes ${MAX_FILES}`;
    if (this.files.reduce((sum, { text }) => sum + text.length, file.size) > MAX_TOTAL) return "is too much: the files of a question have 4 MB together";
    const text = decoded(await file.arrayBuffer());
    if (text === null) return "is no text in UTF-8";
    this.files.push({ name: shownName(file.name), text });
    return "";
  }

  /** @private @param {ClipboardEvent} event */
  onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (!files.length && text.length <= LONG) return;
    event.preventDefault();
    const pasted = new File([text], `pasted-${this.files.length + 1}.txt`, { type: "text/plain" });
    void this.add(files.length ? files : [pasted]);
  }

  /** @private Takes files that are dropped anywhere: a browser would open them in the place of the page. @param {HTMLElement} place to mark */
  takeDrops(place) {
    const mark = (/** @type {DragEvent} */ event, /** @type {boolean} */ isOver) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      place.classList.toggle("dropping", isOver);
    };
    document.addEventListener("dragover", (event) => mark(event, true));
    document.addEventListener("dragleave", (event) => mark(event, false));
    document.addEventListener("drop", (event) => {
      mark(event, false);
      const files = [...(event.dataTransfer?.files ?? [])];
      if (files.length && !document.querySelector("dialog[open]")) void this.add(files);
    });
  }

  /** @private */
  show() {
    this.list.hidden = !this.files.length;
    this.list.dispatchEvent(new Event("input", { bubbles: true })); // the question has changed
    fill(this.list, this.files.map((file) => el("li", {}, `${file.name}, ${sizeOf(file)}`, this.remover(file))));
  }

  /** @private @param {Attachment} file */
  remover(file) {
    const remove = () => {
      this.files = this.files.filter((other) => other !== file);
      this.show();
      byId("question").focus();
    };
    return el("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, onclick: remove }, "Remove");
  }
}

/** A question and its files as the text of a message: each file is a fenced block below its name. @param {string} question @param {Attachment[]} [files] */
export function messageOf(question, files = []) {
  return [question, ...files.map(block)].filter(Boolean).join("\n\n");
}

/** Files that are folded. @param {Attachment[]} files */
export function attachedList(files) {
  return el("ul", { class: "attached", "aria-label": "Attached files" }, files.map((file) => el("li", {}, folded(file))));
}

/** @param {Attachment} file */
function folded(file) {
  const text = new TextView(el("div", { class: "said", tabindex: "0", role: "region", "aria-label": file.name }));
  const open = () => !text.numShown && text.append(file.text);
  return el("details", { ontoggle: open }, el("summary", {}, `${file.name}, ${sizeOf(file)}`), text.element);
}

/** @param {Attachment} file */
function block({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  const extension = /\.([A-Za-z0-9]{1,10})$/.exec(name)?.[1]?.toLowerCase() ?? "";
  return `${name}:\n${fence}${extension === "txt" ? "" : extension}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The text of a file; null: it is none. @param {ArrayBuffer} bytes */
function decoded(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replace(/\r\n/g, "\n");
  } catch {
    return null;
  }
}

/** @param {string} name */
function shownName(name) {
  return visible(name).replace(/[\n\t`]/g, " ").slice(-MAX_NAME);
}

/** @param {Attachment} file */
function sizeOf({ text }) {
  return text.length < 1000 ? `${text.length} characters` : `${(text.length / 1000).toFixed(1)}k characters`;
}
