// Run by node with npm's openai: chat, stream, log-probabilities and errors over the address in the first argument.
import assert from "node:assert";
import { createRequire } from "node:module";

const [url, name, packages] = process.argv.slice(2);
const OpenAI = createRequire(packages + "/")("openai").OpenAI;
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "any", maxRetries: 0 });
const asked = {
  model: name, messages: [{ role: "user", content: "the sea the sea" }], max_tokens: 12, temperature: 0, ignore_eos: true,
};

const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
assert.equal(whole.usage.completion_tokens, 12);
assert.equal(whole.choices[0].logprobs.content.length, 12);

let said = "", usage = null;
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const part of stream) {
  said += part.choices[0]?.delta?.content ?? "";
  usage = part.usage ?? usage;
}
assert.equal(said, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, 12);

const listed = await client.models.list();
assert.deepEqual(listed.data.map((model) => model.id), [name]);
await assert.rejects(client.chat.completions.create({ ...asked, temperature: -3 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ ...asked, model: "other" }), OpenAI.NotFoundError);

const leaving = await client.completions.create({ model: name, prompt: "abc", max_tokens: 1500, stream: true, ignore_eos: true });
for await (const _ of leaving) break;
console.log("npm's openai is content");
