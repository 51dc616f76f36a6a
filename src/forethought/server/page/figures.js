// What a run adds up to, and how two runs differ, in figures and in words.

/** @typedef {import("./run.js").Run} Run */

/**
 * The figures of a run.
 * @param {Run} run
 */
export function summarize(run) {
  const usage = run.usage ?? {};
  const lanes = [...run.branches.values()];
  const streamed = lanes.reduce((sum, branch) => sum + branch.numTokens, 0);
  const speculation = run.finished?.speculation ?? {};
  const { steps = 0, drafted = 0, accepted = 0 } = speculation;
  return {
    status: run.status,
    method: run.method,
    seconds: run.seconds,
    promptTokens: usage.prompt_tokens ?? null,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? null,
    completionTokens: usage.completion_tokens ?? streamed,
    reasoningTokens: usage.completion_tokens_details?.reasoning_tokens ?? null,
    numBranches: Math.max(0, lanes.length - 1),
    steps,
    drafted,
    accepted,
    acceptedByPosition: speculation.accepted_by_position ?? [],
    tokensPerStep: steps ? 1 + accepted / steps : null,
    finishReason: run.finishReason,
  };
}

/** @typedef {ReturnType<typeof summarize>} Summary */

/**
 * What a run saved against the same question with plain decoding, in words.
 * @param {Run} run
 * @param {Run} plain
 * @returns {string}
 */
export function savings(run, plain) {
  if (run.status !== "done" || plain.status !== "done") return "Not known: one of the two did not finish.";
  const [mine, other] = [summarize(run), summarize(plain)];
  const tokens = difference(other.completionTokens - mine.completionTokens, other.completionTokens, "tokens", 0);
  const seconds = difference(other.seconds - mine.seconds, other.seconds, "s", 2);
  return `${tokens}, ${seconds}`;
}

/** @param {number} saved @param {number} of @param {string} unit @param {number} digits */
function difference(saved, of, unit, digits) {
  const share = of ? ` (${Math.round((Math.abs(saved) / of) * 100)} %)` : "";
  return `${Math.abs(saved).toFixed(digits)} ${unit}${share} ${saved >= 0 ? "less" : "more"}`;
}

/**
 * What speculation did in a run: off and why, or whether it paid.
 * @param {Run} run
 * @param {Run | null} plain the same question with plain decoding, where that was run
 * @returns {string}
 */
export function explainSpeculation(run, plain) {
  const told = run.started?.speculation;
  const drafter = told?.drafter;
  if (!drafter || drafter === "none") return `Off${told?.reason ? `: ${told.reason}` : "."}`;
  const note = told.reason ? ` ${told.reason}` : "";
  if (!run.finished) return `${drafter}.${note}`;
  const { steps, drafted, accepted, tokensPerStep } = summarize(run);
  if (!steps) return `${drafter}: the server reports no decode steps.${note}`;
  if (!drafted) return `${drafter} proposed nothing: every step gave one token.${note}`;
  const rate = `${drafter}: ${accepted} of ${drafted} draft tokens accepted, ${tokensPerStep?.toFixed(2)} tokens a step.`;
  return `${rate}${paid(run, plain)}${note}`;
}

/** @param {Run} run @param {Run | null} plain */
function paid(run, plain) {
  if (!plain || plain.status !== "done" || run.method !== plain.method) return "";
  const perToken = (/** @type {Run} */ each) => (1000 * each.seconds) / Math.max(1, summarize(each).completionTokens);
  const [mine, other] = [perToken(run), perToken(plain)];
  const times = ` ${mine.toFixed(2)} ms a token against ${other.toFixed(2)} ms without`;
  if (mine <= other) return `${times}: ${(other / mine).toFixed(2)} times as fast.`;
  return `${times}: it lost, because a step with drafts costs more than the tokens that it adds.`;
}
