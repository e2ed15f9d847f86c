// Chat with the published openai package for JavaScript: a stream with usage, and a whole answer.
// It needs the package: npm install openai.
//
// mstarctl up qwen3_omni:mini -d
// node examples/openai_chat.mjs "Hello" [URL]

const [text, url = "http://localhost:8000"] = process.argv.slice(2);
if (!text) {
  console.error(`usage: node examples/openai_chat.mjs TEXT [URL]`);
  process.exit(2);
}
const { default: OpenAI } = await import("openai"); // here, so that the usage needs no package
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const chat = { model: "any", messages: [{ role: "user", content: text }], seed: 7 };

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
