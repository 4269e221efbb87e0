// Calls the gateway as a program would, and prints as JSON what the client made of the replies.
//     node client.js SCENARIO BASE_URL KEY MODEL
import OpenAI from "openai";

const [scenario, baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "hello" }];
const weather = {
  type: "function",
  function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};
const turn = { model, max_output_tokens: 8, temperature: 0 };
const schema = { type: "object", properties: { n: { enum: [7, 8] } }, required: ["n"] };

async function failure(call) {
  try {
    await call();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status ?? null, message: error.message };
  }
  return null;
}

async function read(stream) {
  for await (const _ of stream);
}

const scenarios = {
  async chat() {
    const reply = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
    const text = await client.completions.create({ model, prompt: "hello", max_tokens: 8 });
    const models = [];
    for await (const one of client.models.list()) models.push(one.id);
    return { content: reply.choices[0].message.content, usage: reply.usage, text: text.choices[0].text, models };
  },

  async stream() {
    // The helper puts the pieces together, and is strict about their order.
    const stream = client.chat.completions.stream({
      model,
      messages,
      max_tokens: 8,
      temperature: 0,
      stream_options: { include_usage: true },
    });
    const ids = new Set();
    for await (const chunk of stream) ids.add(chunk.id);
    const reply = await stream.finalChatCompletion();
    return { content: reply.choices[0].message.content, finish: reply.choices[0].finish_reason, usage: reply.usage, ids: ids.size };
  },

  async tools() {
    const stream = client.chat.completions.stream({ model, messages, tools: [weather], tool_choice: "auto" });
    const reply = await stream.finalChatCompletion();
    const calls = reply.choices[0].message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
    return { calls, finish: reply.choices[0].finish_reason };
  },

  async structured() {
    const response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    const reply = await client.chat.completions.parse({ model, messages, response_format });
    return JSON.parse(reply.choices[0].message.content);
  },

  async responses() {
    const reply = await client.responses.create({ ...turn, input: "hello" });
    const events = [];
    for await (const event of await client.responses.create({ ...turn, input: "hello", stream: true }))
      events.push(event.type);
    const kept = await client.responses.retrieve(reply.id);
    await client.responses.create({ ...turn, input: "and then?", previous_response_id: reply.id });
    const unknown = await failure(() => client.responses.retrieve("resp_unknown"));
    return { text: reply.output_text, events, kept: kept.id, unknown };
  },

  async embeddings() {
    const reply = await client.embeddings.create({ model, input: ["a", "b"] });
    return reply.data.map((one) => Array.from(one.embedding));
  },

  async errors() {
    return {
      unknown: await failure(() => client.chat.completions.create({ model: "x", messages })),
      refused: await failure(() => client.chat.completions.create({ model, messages, kv_transfer_params: {} })),
      key: await failure(() => new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list()),
    };
  },

  async broken() {
    return failure(async () => read(await client.chat.completions.create({ model, messages, stream: true })));
  },

  // When a line comes.
  async abort_before_the_reply() {
    const controller = new AbortController();
    process.stdin.once("data", () => {
      controller.abort();
      process.stdin.destroy();
    });
    return failure(() => client.chat.completions.create({ model, messages }, { signal: controller.signal }));
  },

  async abort_a_stream() {
    const stream = await client.chat.completions.create({ model, messages, stream: true });
    let chunks = 0;
    for await (const _ of stream) if (++chunks == 2) stream.controller.abort();
    return { chunks };
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
