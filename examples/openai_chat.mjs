// Chat with the published openai package for JavaScript: a stream with usage, and a whole answer.
// mstarctl up a model that chats; npm install openai; then: node examples/openai_chat.mjs [URL]
import OpenAI from "openai";

const url = process.argv[2] ?? "http://localhost:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const chat = { model: "any", messages: [{ role: "user", content: "Hello" }], seed: 7 };

const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
let streamed = "";
let tokens = 0;
let reason = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  reason = chunk.choices[0]?.finish_reason ?? reason;
  tokens = chunk.usage?.total_tokens ?? tokens;
}
const whole = await client.chat.completions.create(chat);
console.log(JSON.stringify({ streamed, whole: whole.choices[0].message.content, reason, tokens }));
