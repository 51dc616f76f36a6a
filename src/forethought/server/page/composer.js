// The question and how it is to be answered: method, parameters, drafter, budget, sampling.

import { Attachments, messageOf } from "./attachments.js";
import { byId, download, el, fill } from "./dom.js";
import { enter, enteredIn, parameterField, textsIn } from "./parameters.js";
import { settingsOf } from "./saved.js";

/**
 * @typedef {object} Method
 * @property {string} name
 * @property {string} [title]
 * @property {string} [group] what it does
 * @property {string} [paper]
 * @property {string} [summary]
 * @property {boolean} [available] whether it runs without further settings
 * @property {string | null} [reason] why it does not
 * @property {string[]} [needs] settings without which it does not
 * @property {boolean} [conversation] whether it answers conversations
 * @property {import("./parameters.js").Parameter[]} [parameters]
 *
 * @typedef {{name: string, active: boolean, reason: string | null}} DrafterChoice
 * @typedef {{title: string, prompt: string, method?: string}} Example
 * @typedef {import("./parameters.js").Parameter & {is_usual: boolean}} SamplingField
 *
 * @typedef {object} Settings what is entered in the form beside the question
 * @property {Record<string, string>} [fields] by id
 * @property {Record<string, string>} [parameters] of the method
 * @property {Record<string, string>} [sampling]
 * @property {boolean} [plain]
 * @property {boolean} [tools]
 */

const KEPT = "forethought.settings";
/** The question that is not asked yet, for the same tab. */
const UNSENT = "forethought.question";
const FORMAT = "forethought settings";
const VERSION = 1;
const FIELDS = ["budget-tokens", "budget-calls", "budget-seconds", "system"];
const CHOICES = ["method", "drafter"];

/** The form at the bottom of the conversation. */
export class Composer {
  /**
   * @param {(question: string, files: import("./attachments.js").Attachment[]) => boolean} onAsk says whether it is asked
   * @param {(settings: Settings) => void} onChange called when settings have been entered
   * @param {(text: string) => void} say
   */
  constructor(onAsk, onChange, say) {
    this.onChange = onChange;
    this.attachments = new Attachments(say);
    /** @type {object[]} of the server's MCP servers */
    this.tools = [];
    /** @type {Settings} that are entered once there are fields for them */
    this.settings = kept();
    /** @type {Method[]} */
    this.methods = [];
    /** @type {DrafterChoice[]} */
    this.drafters = [];
    this.question = byId("question");
    this.question.value = sessionStorage.getItem(UNSENT) ?? "";
    addEventListener("pagehide", () => sessionStorage.setItem(UNSENT, this.question.value));
    this.form = byId("composer");
    this.form.addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      const question = this.question.value.trim();
      if (!question && !this.attachments.files.length) return;
      if (!onAsk(question, this.attachments.files)) return;
      this.question.value = "";
      this.attachments.take();
    });
    this.form.addEventListener("invalid", () => (byId("settings").open = true), true);
    this.question.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    byId("method").addEventListener("change", () => this.onMethod());
    byId("drafter").addEventListener("change", () => this.describe());
    this.form.addEventListener("change", () => this.keep());
    byId("export-settings").addEventListener("click", () => download("settings.json", "application/json", toFile(this.settings)));
    byId("reset-settings").addEventListener("click", () => this.replace({}));
    byId("import-settings").addEventListener("change", async (/** @type {any} */ { target }) => {
      const settings = target.files.length ? fromFile(await target.files[0].text()) : null;
      if (settings) this.replace(settings);
      say(settings ? "Settings imported." : "This file holds no settings of forethought.");
      target.value = "";
    });
  }

  /** @private Enters settings in the place of all that are there. @param {Settings} settings */
  replace(settings) {
    byId("method").selectedIndex = byId("drafter").selectedIndex = 0;
    this.enter(settings);
    this.keep();
  }

  /**
   * Fills the choices with what the server offers.
   * @param {{id: string}[]} models
   * @param {Method[]} methods
   * @param {DrafterChoice[]} drafters
   * @param {SamplingField[]} sampling
   * @param {{function: {name: string}}[]} tools
   */
  offer(models, methods, drafters, sampling, tools) {
    this.tools = tools;
    byId("tools").hidden = !tools.length;
    fill(byId("tool-names"), tools.map((tool) => tool.function.name).join(", "));
    this.methods = methods;
    this.drafters = drafters;
    fill(byId("models"), models.map(({ id }) => el("option", { value: id }, id)));
    const groups = [...grouped(methods)].map(([label, members]) => el("optgroup", { label }, members.map(methodOption)));
    fill(byId("method"), groups);
    const choices = drafters.filter(({ name }) => name !== "none");
    fill(
      byId("drafter"),
      el("option", { value: "" }, "server's choice"),
      choices.map(({ name, active }) => el("option", { value: name, disabled: !active }, active ? name : `${name} (off)`)),
      el("option", { value: "none" }, "none"),
    );
    const [usual, further] = [byId("usual-sampling"), byId("further-sampling").querySelector(".fields")];
    fill(usual, sampling.filter((field) => field.is_usual).map((field) => parameterField(field, "sampling")));
    fill(further, sampling.filter((field) => !field.is_usual).map((field) => parameterField(field, "sampling")));
    byId("further-sampling").hidden = !further.children.length;
    this.enter(this.settings);
  }

  /** Puts a question into the form, with its method. @param {Example} example */
  take(example) {
    this.question.value = example.prompt;
    if (example.method) this.chooseMethod(example.method);
    this.question.focus();
  }

  /** @param {string} name */
  chooseMethod(name) {
    if (!this.methods.some((method) => method.name === name && !obstacle(method))) return;
    byId("method").value = name;
    this.onMethod();
    this.keep();
  }

  /** The message that is being written; none: the form is empty. @returns {{role: string, content: string}[]} */
  get written() {
    const content = messageOf(this.question.value.trim(), this.attachments.files);
    return content ? [{ role: "user", content }] : [];
  }

  get method() {
    return this.methods.find(({ name }) => name === byId("method").value) ?? null;
  }

  get model() {
    return byId("models").value;
  }

  get plainToo() {
    return byId("plain-too").checked;
  }

  /**
   * The body of the request, without what streaming adds.
   * @param {{role: string, content: string}[]} messages
   * @returns {import("./run.js").Request}
   */
  request(messages) {
    const system = byId("system").value.trim();
    /** @type {any} */
    const request = { model: this.model, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
    if (this.method) request.method = this.method.name;
    const parameters = enteredIn(byId("parameters"));
    if (Object.keys(parameters).length) request.method_params = parameters;
    const budget = numbers({ tokens: "budget-tokens", calls: "budget-calls", seconds: "budget-seconds" });
    if (Object.keys(budget).length) request.budget = budget;
    const drafter = byId("drafter").value;
    if (drafter) request.speculation = drafter === "none" ? { enabled: false } : { drafter };
    if (this.tools.length && byId("use-tools").checked) request.tools = this.tools;
    return { ...request, ...enteredIn(byId("sampling")) };
  }

  /** @private */
  onMethod() {
    const parameters = this.method?.parameters ?? [];
    fill(byId("parameters"), parameters.length ? parameters.map((parameter) => parameterField(parameter, "parameter")) : el("p", { class: "muted small" }, "This method has none."));
    if (this.method?.needs?.length) byId("settings").open = true;
    this.describe();
  }

  /** @private Says what the chosen method and drafter are. */
  describe() {
    const method = this.method;
    const drafter = this.drafters.find(({ name }) => name === byId("drafter").value);
    const off = this.drafters.filter(({ name, active, reason }) => !active && reason && name !== "none");
    const none = this.drafters.every(({ name }) => name === "none") ? "This server drafts nothing: start it with --speculative." : "";
    const all = off.length && off.length === this.drafters.filter(({ name }) => name !== "none").length;
    const lines = [method?.reason && `Note: ${method.reason}.`, method?.summary, method?.paper && `(${method.paper}.)`, drafter?.reason, all ? `No drafts here: ${off[0].reason}` : "", none];
    fill(byId("about"), lines.filter(Boolean).join(" "));
  }

  /** @private */
  keep() {
    this.settings = {
      fields: Object.fromEntries([...FIELDS, ...CHOICES].map((id) => [id, byId(id).value])),
      parameters: textsIn(byId("parameters")),
      sampling: textsIn(byId("sampling")),
      plain: this.plainToo,
      tools: byId("use-tools").checked,
    };
    this.onChange(this.settings);
    try {
      localStorage.setItem(KEPT, JSON.stringify(this.settings));
    } catch {
      // the browser keeps nothing; the settings last as long as the page
    }
  }

  /** Enters settings, as far as there are fields for them. @param {Settings} settings */
  enter(settings) {
    this.settings = settings;
    const { fields = {}, parameters = {}, sampling = {}, plain, tools } = settings;
    for (const id of FIELDS) byId(id).value = fields[id] ?? "";
    for (const id of CHOICES) {
      const known = [...byId(id).options].some((option) => option.value === fields[id] && !option.disabled);
      if (known) byId(id).value = fields[id];
    }
    byId("plain-too").checked = plain === true;
    byId("use-tools").checked = tools !== false;
    this.onMethod();
    enter(byId("parameters"), parameters);
    enter(byId("sampling"), sampling);
    if (Object.keys(textsIn(byId("further-sampling"))).length) byId("further-sampling").open = true;
  }
}

/** The settings of the last visit. @returns {Settings} */
function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

/** Settings as the text of a file. @param {Settings} settings */
function toFile(settings) {
  return JSON.stringify({ format: FORMAT, version: VERSION, settings }, null, 2);
}

/** The settings of a file; null: it holds none. @param {string} text @returns {Settings | null} */
function fromFile(text) {
  try {
    const { format, version, settings } = JSON.parse(text);
    return format === FORMAT && version === VERSION ? settingsOf(settings) : null;
  } catch {
    return null;
  }
}

/** What drafts, in a sentence. @param {DrafterChoice[]} drafters */
export function drafterLine(drafters) {
  const names = drafters.filter(({ name, active }) => active && name !== "none").map(({ name }) => name);
  return names.length ? `${names.join(", ")} ${names.length > 1 ? "draft" : "drafts"} tokens ahead.` : "Nothing is drafted ahead.";
}

/** The methods by what they do, in their order. @param {Method[]} methods @returns {Map<string, Method[]>} */
export function grouped(methods) {
  /** @type {Map<string, Method[]>} */
  const groups = new Map();
  for (const method of methods) groups.set(method.group ?? "Methods", [...(groups.get(method.group ?? "Methods") ?? []), method]);
  return groups;
}

/** Why a method cannot run here, whatever its settings; empty: it can. @param {Method} method */
export function obstacle({ available, needs, reason, conversation }) {
  if (available === false && !needs?.length) return reason || "it is not available here";
  return conversation === false ? "it answers no conversation" : "";
}

/** @param {Method} method */
function methodOption(method) {
  const why = obstacle(method);
  const name = method.title || method.name;
  return el("option", { value: method.name, disabled: Boolean(why), title: why || null }, why ? `${name} (${why.split(":")[0]})` : name);
}

/** The numbers that were entered. @param {Record<string, string>} inputs field -> id @returns {Record<string, number>} */
function numbers(inputs) {
  const entered = Object.entries(inputs).filter(([, id]) => byId(id).value !== "");
  return Object.fromEntries(entered.map(([name, id]) => [name, Number(byId(id).value)]));
}
