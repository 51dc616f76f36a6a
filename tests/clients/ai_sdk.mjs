// Three turns with a tool through the Vercel AI SDK; prints one JSON object per session.
// Arguments: base URL with /v1; the kind of session.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, kind] = process.argv.slice(2);
const questions = ["What is 2 + 3?", "And 10 more?", "Thanks"];
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "forethought", baseURL, apiKey: "none", includeUsage: true });
const models = {
  responses: () => openai("scripted"),
  "responses without store": () => openai("scripted"),
  chats: () => openai.chat("scripted"),
  compatible: () => compatible("scripted"),
};
const providerOptions =
  kind === "responses without store"
    ? { openai: { store: false, include: ["reasoning.encrypted_content"], reasoningSummary: "auto", textVerbosity: "low" } }
    : undefined;
const tools = {
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => String(a + b),
  }),
};

async function session(streams) {
  const messages = [];
  const turns = [];
  for (const content of questions) {
    messages.push({ role: "user", content });
    const options = { model: models[kind](), messages, tools, stopWhen: stepCountIs(4), maxRetries: 0, providerOptions };
    let result;
    if (streams) {
      result = streamText({ ...options, onError: ({ error }) => { throw error; } });
      for await (const _ of result.fullStream);
    } else {
      result = await generateText(options);
    }
    const steps = await result.steps;
    turns.push({
      text: await result.text,
      outputs: steps.flatMap((step) => step.toolResults.map((each) => each.output)),
      reasoning: steps.map((step) => step.reasoningText ?? "").join(""),
      tokens: (await result.usage).outputTokens,
    });
    messages.push(...(await result.response).messages);
  }
  return turns;
}

for (const streams of [false, true]) console.log(JSON.stringify(await session(streams)));
