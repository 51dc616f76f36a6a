// A conversation as a tree: to edit a question is to ask another one beside it.

import { attachedList, messageOf } from "./attachments.js";
import { byId, careful, el, fill, quietButton } from "./dom.js";
import { rateText, summarize } from "./figures.js";
import { MarkdownView, copyButton } from "./markdown.js";
import { newId } from "./store.js";
import { TextView } from "./text.js";
import { CallsView } from "./tools.js";
import { standing } from "./votes.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./store.js").Turn} Turn
 * @typedef {import("./store.js").Conversation} Conversation
 *
 * @typedef {object} Actions
 * @property {(turn: Turn, question: string) => void} edit asks another question in the place of a turn's
 * @property {(turn: Turn) => void} again answers the question once more
 * @property {(turn: Turn, answer: string, goesOn: boolean) => void} rewrite puts another answer, which the model may go on with, in the place of a turn's
 * @property {(turn: Turn) => void} fork begins a new chat with the turns up to this one
 * @property {(turn: Turn) => void} remove deletes a turn and those below it
 * @property {(turn: Turn) => void} show shows the run of a turn
 * @property {() => void} changed the turns that are shown have changed
 */

/** Where the page is one column, as in style.css. */
const NARROW = "(max-width: 56rem)";
/** Pixels from its end at which one is still there, so that the conversation follows what comes. */
const NEAR = 60;

/** The turns of a conversation, and those of them that are shown. */
export class Tree {
  /** @param {Conversation} [conversation] */
  constructor(conversation) {
    this.conversation = conversation ?? { id: newId(), created: Date.now(), turns: [], active: {} };
  }

  /** @param {string | null} parent @returns {Turn[]} the turns below a turn; null: the first ones */
  below(parent) {
    return this.conversation.turns.filter((turn) => turn.parent === parent);
  }

  /** The turns that are shown, from the first. @returns {Turn[]} */
  get path() {
    /** @type {Turn[]} */
    const path = [];
    for (let parent = /** @type {string | null} */ (null); ; parent = path[path.length - 1].id) {
      const turns = this.below(parent);
      if (!turns.length) return path;
      path.push(turns.find((turn) => turn.id === this.conversation.active[parent ?? ""]) ?? turns[turns.length - 1]);
    }
  }

  /** @param {string | null} parent @param {string} question @param {Pick<Turn, "files" | "begun">} [more] @returns {Turn} */
  add(parent, question, more = {}) {
    const turn = { id: newId(), parent, question, runs: [], created: Date.now(), ...more };
    this.conversation.turns.push(turn);
    this.show(turn);
    return turn;
  }

  /** Shows a turn in the place of those beside it, and the turns above it. @param {Turn} turn */
  show(turn) {
    for (const each of this.upTo(turn.id)) this.conversation.active[each.parent ?? ""] = each.id;
  }

  /** Removes a turn and those below it. @param {Turn} turn @returns {Turn[]} all of them */
  remove(turn) {
    const ids = new Set([turn.id]);
    const removed = [turn];
    for (const each of this.conversation.turns) { // a turn comes after the one above it
      if (each.parent === null || !ids.has(each.parent)) continue;
      ids.add(each.id);
      removed.push(each);
    }
    this.conversation.turns = this.conversation.turns.filter((each) => !ids.has(each.id));
    return removed;
  }

  /** The turns up to this one. @param {string | null} id @returns {Turn[]} */
  upTo(id) {
    const byId = new Map(this.conversation.turns.map((turn) => [turn.id, turn]));
    /** @type {Turn[]} */
    const turns = [];
    for (let turn = byId.get(id ?? ""); turn; turn = byId.get(turn.parent ?? "")) turns.push(turn);
    return turns.reverse();
  }

  /** The messages of the turns that are shown, with their answers. @param {(turn: Turn) => Run | null} runOf */
  allMessages(runOf) {
    return this.path.flatMap((turn) => [
      { role: "user", content: messageOf(turn.question, turn.files) },
      { role: "assistant", content: answerOf(turn, runOf(turn)) },
    ]);
  }

  /**
   * The messages of a request for a turn.
   * @param {Turn} turn
   * @param {(turn: Turn) => Run | null} runOf
   */
  messages(turn, runOf) {
    return this.upTo(turn.id).flatMap((each) => {
      const asked = { role: "user", content: messageOf(each.question, each.files) };
      const answer = each.id === turn.id ? each.begun : answerOf(each, runOf(each));
      return answer === undefined ? [asked] : [asked, { role: "assistant", content: answer }];
    });
  }
}

/** The answer of a turn, as it was generated or written. @param {Turn} turn @param {Run | null} run */
function answerOf(turn, run) {
  return run?.answer ?? turn.begun ?? "";
}

/** Shows the turns of a tree. */
export class ConversationView {
  /** @param {(turn: Turn) => Run | null} runOf @param {Actions} actions @param {HTMLElement} welcome shown where there is no turn */
  constructor(runOf, actions, welcome) {
    this.runOf = runOf;
    this.actions = actions;
    this.welcome = welcome;
    this.element = byId("turns");
    this.form = byId("composer");
    this.isNarrow = matchMedia(NARROW);
    /** @type {Map<string, TurnView>} */
    this.views = new Map();
  }

  /** @param {Tree} tree */
  render(tree) {
    this.views.clear();
    const articles = tree.path.map((turn) => {
      const view = new TurnView(turn, this.runOf(turn), tree, this.actions);
      this.views.set(turn.id, view);
      return view.element;
    });
    fill(this.element, articles.length ? articles : this.welcome);
    this.update();
    if (articles.length) this.goToEnd();
    else this.element.scrollTop = 0;
  }

  /** Shows what has come since. */
  update() {
    const atEnd = this.numBelow < NEAR;
    for (const view of this.views.values()) view.update();
    if (atEnd) this.goToEnd();
  }

  /** @private Pixels of the conversation below what is in sight. */
  get numBelow() {
    const box = this.element;
    if (!this.isNarrow.matches) return box.scrollHeight - box.scrollTop - box.clientHeight;
    return box.getBoundingClientRect().bottom - this.form.getBoundingClientRect().top;
  }

  /** @private Scrolls the conversation or, where it is no box of its own, the page. */
  goToEnd() {
    if (!this.isNarrow.matches) this.element.scrollTop = this.element.scrollHeight;
    else if (this.numBelow > 0) scrollBy(0, this.numBelow);
  }
}

/** One question and its answer. */
class TurnView {
  /** @param {Turn} turn @param {Run | null} run @param {Tree} tree @param {Actions} actions */
  constructor(turn, run, tree, actions) {
    this.turn = turn;
    this.run = run;
    this.tree = tree;
    this.actions = actions;
    this.question = el("p", { class: "said", dir: "auto" });
    new TextView(this.question).append(turn.question);
    this.reasoning = new TextView(el("div", { class: "said", dir: "auto" }));
    this.answer = new TextView(el("div", { class: "said answer", dir: "auto" }));
    this.markdown = new MarkdownView(this.answer.element);
    this.thoughtName = el("summary", {}, "Thought");
    this.thought = el("details", { class: "thought", hidden: true }, this.thoughtName, this.reasoning.element);
    this.calls = new CallsView();
    this.note = el("p", { class: "note muted small" });
    this.shown = { answer: "", reasoning: "" };
    this.lastStatus = "";
    this.isThinking = false;
    this.head = el("div", { class: "row" }, el("h3", {}, "Question"), el("span", { class: "spacer" }), this.beside(), copyButton(() => messageOf(turn.question, turn.files), "Copy the question"), quietButton("Edit", () => this.edit()), careful("Delete", () => actions.remove(turn), "Delete the question, its answer and what follows"));
    this.goOn = quietButton("Continue", () => actions.rewrite(turn, answerOf(turn, run), true));
    this.goOn.hidden = true;
    this.foot = el(
      "div",
      { class: "row foot" },
      this.note,
      el("span", { class: "spacer" }),
      this.goOn,
      quietButton("Regenerate", () => actions.again(turn)),
      quietButton("Fork", () => actions.fork(turn), "Fork to a new chat, up to this answer"),
      run && quietButton("Show run", () => actions.show(turn)),
    );
    const answerHead = el("div", { class: "row" }, el("h3", {}, "Answer"), el("span", { class: "spacer" }), copyButton(() => answerOf(this.turn, this.run), "Copy the answer"), quietButton("Edit answer", () => this.editAnswer()));
    this.shownAnswer = el("div", {}, this.thought, this.calls.element, this.answer.element, this.markdown.element);
    this.element = el("article", { class: "turn" }, this.head, this.question, turn.files?.length && attachedList(turn.files), answerHead, this.shownAnswer, this.foot);
    if (!run) fill(this.note, "Written by hand");
  }

  /** @private Goes to the questions asked in the place of this one. */
  beside() {
    const turns = this.tree.below(this.turn.parent);
    if (turns.length < 2) return null;
    const now = turns.findIndex((each) => each.id === this.turn.id);
    const go = (/** @type {number} */ to) => () => {
      this.tree.show(turns[to]);
      this.actions.changed();
    };
    return el(
      "span",
      { class: "beside", role: "group", "aria-label": "Branches of the conversation" },
      el("button", { type: "button", class: "quiet", "aria-label": "Previous branch", disabled: now === 0, onclick: go(now - 1) }, "‹"),
      el("span", { class: "small" }, `${now + 1} of ${turns.length}`),
      el("button", { type: "button", class: "quiet", "aria-label": "Next branch", disabled: now === turns.length - 1, onclick: go(now + 1) }, "›"),
    );
  }

  /** @private */
  edit() {
    const ask = (/** @type {string} */ text) => this.actions.edit(this.turn, text);
    this.form(this.question, this.turn.question, "Edited question", [["Ask as a branch", ask]]);
  }

  /** @private */
  editAnswer() {
    if (this.run && !this.run.isOver) return;
    const rewrite = (/** @type {boolean} */ goesOn) => (/** @type {string} */ text) => this.actions.rewrite(this.turn, text, goesOn);
    this.form(this.shownAnswer, answerOf(this.turn, this.run), "Edited answer", [["Save as a branch", rewrite(false)], ["Continue from here", rewrite(true)]]);
  }

  /**
   * Edits a text in the place of the element that shows it.
   * @private
   * @param {HTMLElement} shown
   * @param {string} text
   * @param {string} label
   * @param {[label: string, use: (text: string) => void][]} uses the last is that of Enter, or of Ctrl+Enter where the text may have lines
   */
  form(shown, text, label, uses) {
    const hasLines = uses.length > 1;
    const input = el("textarea", { rows: hasLines ? 8 : 3, "aria-label": label, spellcheck: "false", value: text });
    const close = () => form.replaceWith(shown);
    const submit = (/** @type {(text: string) => void} */ use) => {
      if (input.value.trim()) use(hasLines ? input.value : input.value.trim());
    };
    const [last, use] = uses[uses.length - 1];
    const others = uses.slice(0, -1).map(([name, other]) => quietButton(name, () => submit(other)));
    const form = el(
      "form",
      {
        class: "edit",
        onsubmit: (/** @type {Event} */ event) => {
          event.preventDefault();
          submit(use);
        },
        onkeydown: (/** @type {KeyboardEvent} */ event) => {
          if (event.key === "Escape") close();
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing && (!hasLines || event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      input,
      el("div", { class: "row wrap" }, el("span", { class: "spacer" }), quietButton("Cancel", close), others, el("button", { class: "primary" }, last)),
    );
    shown.replaceWith(form);
    input.focus();
  }

  update() {
    const run = this.run;
    this.grow("reasoning", run?.reasoning ?? "");
    this.grow("answer", answerOf(this.turn, run));
    this.markdown.show(answerOf(this.turn, run), run?.isOver ?? true);
    if (!run) return;
    this.calls.update(run);
    this.updateThought(run);
    if (run.isOver && this.lastStatus === run.status) return;
    this.lastStatus = run.status;
    this.element.setAttribute("aria-busy", String(!run.isOver));
    fill(this.note, noteOf(run));
    this.note.classList.toggle("bad", run.status === "failed");
    this.goOn.hidden = !run.isOver || !run.answer || (run.status === "done" && run.finishReason !== "length");
  }

  /** @private A thought is open while the model thinks, and closed when the answer begins. @param {Run} run */
  updateThought(run) {
    const isThinking = !run.isOver && run.reasoning !== "" && run.answer === run.begun;
    this.thought.hidden = !run.reasoning;
    const box = this.reasoning.element;
    if (isThinking && box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
    if (isThinking === this.isThinking) return;
    this.isThinking = this.thought.open = isThinking;
    fill(this.thoughtName, isThinking ? "Thinking …" : "Thought");
  }

  /** @private @param {"answer" | "reasoning"} name @param {string} text */
  grow(name, text) {
    const shown = this.shown[name];
    if (text === shown) return;
    if (text.startsWith(shown)) this[name].append(text.slice(shown.length));
    else {
      this[name].clear(); // the answer as the method decided it, in the place of what was streamed
      this[name].append(text);
    }
    this.shown[name] = text;
  }
}

/** How a run went, in one line. @param {Run} run */
export function noteOf(run) {
  const { completionTokens, seconds, tokensPerSecond, promptTokens, cachedTokens, method } = summarize(run);
  const speed = tokensPerSecond === null ? "" : `, ${rateText(tokensPerSecond)} tokens/s`;
  const size = `${method}, ${completionTokens.toLocaleString("en")} tokens, ${seconds.toFixed(2)} s${speed}`;
  const reused = cachedTokens ? `, ${cachedTokens.toLocaleString("en")} of ${promptTokens.toLocaleString("en")} prompt tokens reused` : "";
  switch (run.status) {
    case "running":
      if (!run.hasBegun && !run.polls.size) return `${method}: waiting for the first token, ${seconds.toFixed(0)} s`;
      return [size, standing(run)].filter(Boolean).join(", ");
    case "done":
      return size + reused + (run.finishReason === "length" ? ", cut at its limit" : "");
    case "stopped":
      return `${size}, stopped`;
    case "interrupted":
      return `${size}, interrupted: the page was left`;
    default:
      return `Failed: ${run.error}`;
  }
}
