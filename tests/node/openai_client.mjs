// The `openai` package of npm against a running server.
//
//     node openai_client.mjs http://127.0.0.1:8000/v1
//
// Exits with an error when a call fails or breaks the contract.
import assert from "node:assert/strict";
import OpenAI from "openai";

const TOOL = {
  name: "get_weather",
  description: "Get the current weather of a city.",
  parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]},
};
const QUESTION = "What is the weather in Paris?";
const GREEDY = {temperature: 0, max_tokens: 512};

const client = new OpenAI({baseURL: process.argv[2], apiKey: "unused", maxRetries: 0, timeout: 120_000});
const [{id: model}] = (await client.models.list()).data;

/** The deltas of a stream, joined. */
async function joined(stream) {
  const all = {content: "", reasoning: "", calls: [], finish: null, usage: null};
  for await (const event of stream) {
    for (const {delta, finish_reason: finish} of event.choices) {
      all.content += delta.content ?? "";
      all.reasoning += delta.reasoning ?? "";
      for (const call of delta.tool_calls ?? []) all.calls[call.index] = call.function;
      all.finish = finish ?? all.finish;
    }
    all.usage = event.usage ?? all.usage;
  }
  return all;
}

async function chat() {
  const ask = {model, messages: [{role: "user", content: "What is the capital of France?"}], max_tokens: 48, seed: 7};
  const whole = await client.chat.completions.create(ask);
  const {message, finish_reason: finish} = whole.choices[0];
  assert.equal(whole.model, model);
  assert.ok(["stop", "length"].includes(finish), finish);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  // One prompt and one seed: the same reply, streamed or not.
  const stream = {...ask, stream: true, stream_options: {include_usage: true}};
  const parts = await joined(await client.chat.completions.create(stream));
  assert.equal(parts.content, message.content ?? "");
  assert.equal(parts.reasoning, message.reasoning ?? "");
  assert.equal(parts.finish, finish);
  assert.deepEqual(parts.usage, whole.usage);
  // The package's own way of joining.
  const final = await client.chat.completions.stream(ask).finalChatCompletion();
  assert.equal(final.choices[0].message.content ?? "", message.content ?? "");
  return message.content;
}

/** A call, its result, and the reply to it; whole, streamed, and with the package's own loop. */
async function tools() {
  const offer = {...GREEDY, tools: [{type: "function", function: TOOL}]};
  const messages = [{role: "user", content: QUESTION}];
  const whole = await client.chat.completions.create({model, messages, ...offer});
  const {message, finish_reason: finish} = whole.choices[0];
  assert.equal(finish, "tool_calls");
  assert.equal(message.tool_calls.length, 1);
  const [call] = message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.match(JSON.parse(call.function.arguments).city, /Paris/);
  const parts = await joined(await client.chat.completions.create({model, messages, ...offer, stream: true}));
  assert.deepEqual(parts.calls.map(({name, arguments: given}) => [name, given]), [["get_weather", call.function.arguments]]);
  assert.equal(parts.finish, "tool_calls");
  messages.push(message, {role: "tool", tool_call_id: call.id, content: "sunny, 21 degrees"});
  const after = await client.chat.completions.create({model, messages, ...offer, max_tokens: 48});
  assert.ok(after.usage.prompt_tokens > whole.usage.prompt_tokens);

  const asked = [];
  const look = {...TOOL, parse: JSON.parse, function: ({city}) => { asked.push(city); return `sunny in ${city}`; }};
  const body = {model, messages: [{role: "user", content: QUESTION}], ...GREEDY, tools: [{type: "function", function: look}]};
  const runner = client.chat.completions.runTools({...body, stream: true}, {maxChatCompletions: 2});
  await runner.done();
  assert.ok(asked.length > 0 && asked.every(city => /Paris/.test(city)), asked);
  assert.ok(runner.messages.some(said => said.role === "tool" && said.content === "sunny in Paris"), runner.messages);
}

/** A schema is obeyed, or the reply says that it was not looked at: never silent. */
async function structured() {
  const schema = {type: "object", properties: {city: {type: "string"}}, required: ["city"], additionalProperties: false};
  const reply = await client.chat.completions.create({
    model, messages: [{role: "user", content: "The capital of France as JSON."}], ...GREEDY, reasoning_effort: "none",
    response_format: {type: "json_schema", json_schema: {name: "answer", strict: true, schema}},
  });
  if (reply.tensorfold.ignored?.includes("response_format")) return;
  const answer = JSON.parse(reply.choices[0].message.content);
  assert.deepEqual(Object.keys(answer), ["city"]);
  assert.equal(typeof answer.city, "string");

  const parameters = {type: "object", properties: {city: {type: "string", maxLength: 24}, days: {type: "integer", minimum: 1, maximum: 9}},
    required: ["city", "days"], additionalProperties: false};
  // The package reads arguments of strict tools; what is no JSON throws.
  const called = await client.chat.completions.parse({
    model, messages: [{role: "user", content: "Look at Oslo."}], ...GREEDY, max_tokens: 400, reasoning_effort: "none",
    tools: [{type: "function", function: {name: "look", strict: true, parameters}}], tool_choice: "required", parallel_tool_calls: false,
  });
  const [call] = called.choices[0].message.tool_calls;
  assert.deepEqual(Object.keys(call.function.parsed_arguments), ["city", "days"]);
  assert.ok(call.function.parsed_arguments.days >= 1 && call.function.parsed_arguments.days <= 9, call.function.arguments);
  await assert.rejects(client.chat.completions.create({
    model, messages: [{role: "user", content: "Hi"}], response_format: {type: "json_schema", json_schema: {name: "bad", schema: {not: {}}}},
  }), error => error.status === 400 && error.message.includes("/not"));
}

async function responses() {
  const ask = {model, input: "What is 2 + 3?", max_output_tokens: 400, temperature: 0};
  const whole = await client.responses.create(ask);
  assert.ok(["completed", "incomplete"].includes(whole.status), whole.status);
  let text = "", last = null;
  for await (const event of await client.responses.create({...ask, stream: true})) {
    if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(event.sequence_number, (last?.sequence_number ?? -1) + 1);
    last = event;
  }
  assert.ok(["response.completed", "response.incomplete"].includes(last.type), last.type);
  assert.equal(text, whole.output_text);
  // The package joins the events itself, and fails on one that is out of order.
  const final = await client.responses.stream(ask).finalResponse();
  assert.equal(final.output_text, whole.output_text);

  const offer = [{type: "function", strict: false, ...TOOL}, {type: "web_search"}];
  const input = [{role: "user", content: QUESTION}];
  const called = await client.responses.create({...ask, input, tools: offer, max_output_tokens: 512});
  const [call] = called.output.filter(item => item.type === "function_call");
  assert.match(JSON.parse(call.arguments).city, /Paris/);
  input.push(...called.output, {type: "function_call_output", call_id: call.call_id, output: "sunny"});
  const after = await client.responses.create({...ask, input, tools: offer, max_output_tokens: 48});
  assert.ok(after.usage.input_tokens > called.usage.input_tokens);
}

async function refusals() {
  const messages = [{role: "user", content: "hello"}];
  for (const [more, param, code] of [[{n: 2}, "n", null], [{max_tokens: 1e9}, "messages", "context_length_exceeded"]]) {
    await assert.rejects(client.chat.completions.create({model, messages, ...more}), error => {
      assert.ok(error instanceof OpenAI.BadRequestError, error);
      assert.deepEqual([error.param, error.code], [param, code]);
      return true;
    });
  }
}

const said = await chat();
await tools();
await structured();
await responses();
await refusals();
console.log("ok:", JSON.stringify(said));
