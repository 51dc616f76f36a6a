// The server's API: JSON with `get`, a streamed answer with its events by `ask`.

/** A request that the server refused, with the reason that it gave. */
export class ServerError extends Error {
  /** @param {number} status @param {string} message @param {string | null} [retryAfter] */
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

let key = sessionStorage.getItem("forethought.key") ?? "";

/** Sends an API key with all requests from now on, until this tab is closed. @param {string} value */
export function setKey(value) {
  key = value;
  sessionStorage.setItem("forethought.key", value);
}

/** @returns {Record<string, string>} */
function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The JSON at a path of the server. @param {string} path @returns {Promise<any>} */
export async function get(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The answer of the server to JSON. @param {string} path @param {object} body @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function post(path, body, signal) {
  const sent = { "content-type": "application/json", ...headers() };
  const response = await fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** @param {Response} response */
async function refusal(response) {
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try {
    message = JSON.parse(text).error?.message ?? message;
  } catch {
    // not JSON: the text itself
  }
  return new ServerError(response.status, message, response.headers.get("retry-after"));
}

/**
 * Splits a stream of bytes into server-sent events.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  /** @type {string[]} the beginning of a line that has not ended, in pieces: a line may be large */
  let unfinished = [];
  let event = "";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const lines = decoder.decode(value, { stream: !done }).split("\n");
      for (const [number, part] of lines.entries()) {
        unfinished.push(part);
        if (number === lines.length - 1 && !done) continue;
        const line = unfinished.join("").replace(/\r$/, "");
        unfinished = [];
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Asks for a streamed answer. Ending it through `signal` ends the work on the server.
 * @param {object} request the body of /v1/chat/completions
 * @param {AbortSignal} signal
 * @param {(event: any) => void} onEvent gets the events of the run in order: those of the server,
 *   `{type: "answer", text, reasoning}` for each piece of the answer, and `{type: "calling", calls}`
 *   for pieces of calls of tools
 * @throws {ServerError} if the server refuses
 */
export async function ask(request, signal, onEvent) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok || !response.body) throw await refusal(response);
  for await (const { event, data } of readEvents(response.body)) {
    if (event === "forethought") onEvent(JSON.parse(data));
    else if (data === "[DONE]") return;
    else if (event === "message") onChunk(JSON.parse(data), onEvent);
  }
  throw new ServerError(0, "The connection ended before the answer did.");
}

/** @param {any} chunk @param {(event: any) => void} onEvent */
function onChunk(chunk, onEvent) {
  if (chunk.error) throw new ServerError(0, chunk.error.message ?? String(chunk.error));
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const text = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (text || reasoning) onEvent({ type: "answer", text, reasoning });
  if (delta.tool_calls?.length) onEvent({ type: "calling", calls: delta.tool_calls });
  if (choice?.finish_reason) onEvent({ type: "answered", finish_reason: choice.finish_reason });
  if (chunk.usage) onEvent({ type: "usage", usage: chunk.usage });
}
