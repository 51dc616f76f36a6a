// A run as a file: JSON, or one HTML page without scripts that also holds the JSON.

import { describe } from "./decisions.js";
import { explainSpeculation, savings, summarize } from "./figures.js";
import { runOf } from "./saved.js";
import { visible } from "./text.js";

/**
 * @typedef {import("./run.js").Run} Run
 */

const FORMAT = "forethought run";
const VERSION = 1;

/** @param {Run} run @returns {string} */
export function toJson(run) {
  return JSON.stringify({ format: FORMAT, version: VERSION, record: run.record, events: run.events });
}

/**
 * A run from an exported file, JSON or HTML.
 * @param {string} text
 * @returns {Run}
 * @throws {Error} if it is no such file
 */
export function fromFile(text) {
  const isPage = text.trimStart().startsWith("<");
  const json = isPage ? text.match(/<script[^>]* id="run"[^>]*>([^<]*)</)?.[1] ?? "" : text;
  let values;
  try {
    values = JSON.parse(json);
  } catch {
    throw new Error("This file holds no run: it is neither an exported JSON nor an exported page.");
  }
  const { format, version, record, events } = values ?? {};
  const isNewer = format === FORMAT && version !== VERSION;
  if (isNewer) throw new Error(`This run is of version ${version}; this page reads version ${VERSION}.`);
  const run = format === FORMAT ? runOf(record, events) : null;
  if (!run) throw new Error("This file holds no run of forethought.");
  return run;
}

const STYLE = `
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin-top: 2rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; font: 0.9rem/1.5 ui-monospace, monospace; }
img { max-width: 100%; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.15rem 1rem 0.15rem 0; vertical-align: top; font-weight: normal; }
th { opacity: 0.7; } summary { cursor: pointer; }
`;

/**
 * One self-contained page: question, answer, figures, lanes as a picture, every branch as text.
 * It has no script and loads nothing.
 * @param {Run} run
 * @param {Run | null} plain the same question with plain decoding
 * @param {string} picture a data URL of the lanes
 * @returns {string}
 */
export function toHtml(run, plain, picture) {
  const page = document.implementation.createHTMLDocument(`${run.method}: ${visible(run.question.slice(0, 60))}`);
  const add = (/** @type {string} */ tag, /** @type {string} */ text, /** @type {Element} */ parent = page.body) => {
    const element = page.createElement(tag);
    element.textContent = visible(text);
    parent.append(element);
    return element;
  };
  const charset = page.createElement("meta");
  charset.setAttribute("charset", "utf-8");
  const policy = page.createElement("meta");
  policy.httpEquiv = "Content-Security-Policy";
  policy.content = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
  page.head.prepend(charset, policy);
  add("h1", `${run.method} on ${run.record.request.model}`);
  add("p", `${new Date(run.record.created).toISOString()}, ${run.status}`);
  add("h2", "Question");
  add("pre", run.question);
  add("h2", "Answer");
  if (run.reasoning) add("pre", run.reasoning, withSummary(page, "Thought"));
  add("pre", run.answer);
  add("h2", "Figures");
  addTable(page, Object.entries(facts(run, plain)), add);
  add("h2", "Branches");
  const image = page.createElement("img");
  image.src = picture;
  image.alt = `${run.branches.size} branches over ${run.seconds.toFixed(2)} seconds`;
  page.body.append(image);
  for (const branch of run.lanes) {
    if (branch.pieces.length) add("pre", branch.text, withSummary(page, `${branch.name}: ${branch.numTokens} tokens`));
  }
  if (run.stages.length) {
    add("h2", "Decisions");
    addTable(page, run.stages.map((stage) => [`${stage.at.toFixed(2)} s ${stage.branch || "request"}`, describe(stage)]), add);
  }
  const data = page.createElement("script");
  data.type = "application/json";
  data.id = "run";
  data.textContent = toJson(run).replaceAll("<", "\\u003c");
  page.body.append(data);
  // The style is put in as text: this document is under the policy of the page, which has no inline styles.
  const html = page.documentElement.outerHTML.replace("</head>", () => `<style>${STYLE}</style></head>`);
  return `<!doctype html>\n${html}\n`;
}

/** @param {Document} page @param {string} title */
function withSummary(page, title) {
  const details = page.createElement("details");
  const summary = page.createElement("summary");
  summary.textContent = title;
  details.append(summary);
  page.body.append(details);
  return details;
}

/** @param {Document} page @param {[string, string][] | string[][]} rows @param {(tag: string, text: string, parent: Element) => Element} add */
function addTable(page, rows, add) {
  const table = page.createElement("table");
  for (const [name, value] of rows) {
    const row = page.createElement("tr");
    add("th", name, row);
    add("td", String(value), row);
    table.append(row);
  }
  page.body.append(table);
}

/** @param {Run} run @param {Run | null} plain @returns {Record<string, string>} */
function facts(run, plain) {
  const summary = summarize(run);
  return {
    Tokens: String(summary.completionTokens),
    Seconds: summary.seconds.toFixed(3),
    "Prompt tokens": `${summary.promptTokens ?? "not told"}, ${summary.cachedTokens ?? 0} of them reused`,
    Speculation: explainSpeculation(run, plain),
    "Against plain": plain ? savings(run, plain) : "not run",
    Parameters: JSON.stringify({ ...run.record.request, messages: undefined }),
  };
}
