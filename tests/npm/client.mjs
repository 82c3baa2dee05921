// Every kind of call that the npm package makes, against the server whose URL is the argument; prints what came as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 20000 });
const model = "fake-model";
const messages = [{ role: "user", content: "hi" }];
const found = {};

found.models = (await client.models.list()).data.map((each) => each.id);
const chat = await client.chat.completions.create({ model, messages });
found.chat = { text: chat.choices[0].message.content, reason: chat.choices[0].finish_reason, usage: chat.usage };

found.chunks = [];
let usage = null;
for await (const chunk of await client.chat.completions.create({
  model, messages, stream: true, stream_options: { include_usage: true },
})) {
  found.chunks.push(chunk.choices[0]?.delta.content ?? "");
  usage = chunk.usage ?? usage;
}
found.streamUsage = usage;
found.helper = await client.chat.completions.stream({ model, messages }).finalContent();

const completion = await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 3, logprobs: 1 });
found.completions = completion.choices.map((each) => each.text);

const tools = [{ type: "function", name: "weather", parameters: { type: "object", properties: {} }, strict: false }];
const first = await client.responses.create({ model, input: "hi", instructions: "be kind", tools });
found.response = { text: first.output_text, status: first.status, usage: first.usage };
found.events = [];
for await (const event of await client.responses.create({ model, input: "hi", stream: true })) found.events.push(event.type);
const helper = client.responses.stream({ model, input: "hi" });
found.responseHelper = (await helper.finalResponse()).output_text;
const second = await client.responses.create({ model, input: "on", previous_response_id: first.id });
found.previous = second.previous_response_id === first.id && second.usage.input_tokens > first.usage.input_tokens;
found.retrieved = (await client.responses.retrieve(first.id)).output_text;
await client.responses.delete(first.id);

const vectors = await client.embeddings.create({ model, input: ["abcd", "abc"] });
found.embeddings = vectors.data.map((each) => each.embedding);

found.errors = {};
const failing = {
  unknownField: () => client.chat.completions.create({ model, messages, nonsense: 1 }),
  wrongModel: () => client.chat.completions.create({ model: "other", messages }),
  gone: () => client.responses.retrieve(first.id),
};
for (const [name, call] of Object.entries(failing)) {
  await call().then(
    () => { found.errors[name] = null; },
    (error) => { found.errors[name] = [error.constructor.name, error.status, error.param]; },
  );
}

const stopped = await client.chat.completions.create({ model, messages: [{ role: "user", content: "slow" }], stream: true });
for await (const chunk of stopped) if (chunk.choices[0]?.delta.content) break;
stopped.controller.abort();

console.log(JSON.stringify(found));
