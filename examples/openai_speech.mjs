// Speak with the published openai package for JavaScript: a whole file, a stream, and a refusal.
// It needs the package: npm install openai.
//
// mstarctl up orpheus:mini -d
// node examples/openai_speech.mjs "Hello there" [URL]

const [text, url = "http://localhost:8000"] = process.argv.slice(2);
if (!text) {
  console.error(`usage: node examples/openai_speech.mjs TEXT [URL]`);
  process.exit(2);
}
const { default: OpenAI } = await import("openai"); // here, so that the usage needs no package
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const speech = { model: "orpheus", voice: "tara", input: text, seed: 7 };

const whole = await client.audio.speech.create({ ...speech, response_format: "wav" });
const file = Buffer.from(await whole.arrayBuffer());
await writeFile("node.wav", file);

const streamed = await client.audio.speech.create({ ...speech, response_format: "pcm", stream: true });
let bytes = 0;
for await (const piece of streamed.body) bytes += piece.length;

const models = [];
for await (const model of client.models.list()) models.push(model.id);

let refusal = "none";
try {
  await client.audio.speech.create({ ...speech, voice: "nobody" });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  refusal = `${error.status} ${error.code} ${error.param}`;
}
console.log(JSON.stringify({ whole: file.length, streamed: bytes, models, refusal }));
