// The AI SDK (`ai` with `@ai-sdk/openai-compatible`, of npm) against a running server.
//
//     node ai_client.mjs http://127.0.0.1:8000/v1
//
// Exits with an error when a call fails or breaks the contract.
import assert from "node:assert/strict";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
import {generateText, stepCountIs, streamText, tool} from "ai";
import {z} from "zod";

const provider = createOpenAICompatible({name: "plugfold", baseURL: process.argv[2], includeUsage: true});
const model = provider("any");
const once = {model, temperature: 0, maxOutputTokens: 512, maxRetries: 0};

async function text() {
  const prompt = "What is the capital of France?";
  const whole = await generateText({...once, prompt});
  const streamed = streamText({...once, prompt, onError: ({error}) => { throw error; }});
  let joined = "", thought = "";
  for await (const part of streamed.fullStream) {
    assert.notEqual(part.type, "error", part.error);
    if (part.type === "text-delta") joined += part.text;
    if (part.type === "reasoning-delta") thought += part.text;
  }
  assert.equal(joined, whole.text);
  assert.equal(thought, whole.reasoningText ?? "");
  assert.equal(await streamed.finishReason, whole.finishReason);
  assert.ok(["stop", "length"].includes(whole.finishReason), whole.finishReason);
  const [a, b] = [await streamed.usage, whole.usage];
  assert.ok(b.inputTokens > 0 && b.outputTokens > 0, b);
  assert.deepEqual([a.inputTokens, a.outputTokens, a.totalTokens], [b.inputTokens, b.outputTokens, b.totalTokens]);
  return whole.text;
}

/** The call is read from the stream, run, and its result answered: two requests. */
async function tools() {
  const asked = [];
  const get_weather = tool({
    description: "Get the current weather of a city.",
    inputSchema: z.object({city: z.string()}),
    execute: async ({city}) => { asked.push(city); return `sunny in ${city}`; },
  });
  const run = streamText({
    ...once, tools: {get_weather}, stopWhen: stepCountIs(2), prompt: "What is the weather in Paris?",
    onError: ({error}) => { throw error; },
  });
  const kinds = new Set();
  for await (const part of run.fullStream) {
    assert.ok(part.type !== "error" && part.type !== "tool-error", part.error);
    kinds.add(part.type);
  }
  assert.ok(kinds.has("tool-call") && kinds.has("tool-result"), [...kinds]);
  assert.ok(asked.length > 0 && asked.every(city => /Paris/.test(city)), asked);
  const [first, second] = await run.steps;
  assert.equal(first.finishReason, "tool-calls");
  assert.deepEqual(first.toolCalls.map(call => [call.toolName, Object.keys(call.input)]), [["get_weather", ["city"]]]);
  assert.ok(second.usage.inputTokens > first.usage.inputTokens, "the result is in the second prompt");
}

const said = await text();
await tools();
console.log("ok:", JSON.stringify(said));
