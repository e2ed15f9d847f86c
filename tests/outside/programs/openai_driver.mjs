// Calls of OpenAI's client for JavaScript. Prints one JSON line for each case.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0, timeout: 120000 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is 2 and 3?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { type: "function", function: { name: "weather", parameters } };

function check(condition, text) {
  if (!condition) throw new Error(text);
}

const cases = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 16 });
    check(["stop", "length"].includes(answer.choices[0].finish_reason), "no finish reason");
  },
  async chat_streamed() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 16, stream: true });
    let last;
    for await (const chunk of stream) last = chunk;
    check(["stop", "length"].includes(last.choices[0].finish_reason), "no finish reason");
  },
  async tools() {
    const asked = { model, messages, tools: [tool], tool_choice: "required", max_tokens: 400 };
    const answer = await client.chat.completions.stream(asked).finalChatCompletion();
    const call = answer.choices[0].message.tool_calls[0];
    check(call.function.name === "weather", "no call");
    JSON.parse(call.function.arguments);
  },
  async completion() {
    const answer = await client.completions.create({ model, prompt: "One two", max_tokens: 8 });
    check(typeof answer.choices[0].text === "string", "no text");
  },
  async responses() {
    const answer = await client.responses.stream({ model, input: "Hello", max_output_tokens: 16 }).finalResponse();
    check(["completed", "incomplete"].includes(answer.status), "not completed");
  },
  async image() {
    const answer = await client.images.generate({ model, prompt: "a red circle" });
    check(answer.data[0].b64_json.length > 100, "no image");
  },
  async speech() {
    const voice = process.env.VOICE ?? "tara";
    const answer = await client.audio.speech.create({ model, input: "One two three.", voice });
    check((await answer.arrayBuffer()).byteLength > 1000, "no sound");
  },
  async transcription() {
    const asked = { model, input: "How many shapes are there?", voice: "ethan", response_format: "wav" };
    const sound = await client.audio.speech.create(asked);
    const file = await toFile(Buffer.from(await sound.arrayBuffer()), "sound.wav");
    check(typeof (await client.audio.transcriptions.create({ model, file })).text === "string", "no text");
  },
};

for (const kind of process.env.KINDS.split(",")) {
  for (const name of kind === "chat" ? ["chat", "chat_streamed"] : [kind]) {
    let verdict = "passed", message = "";
    try {
      await cases[name]();
    } catch (error) {
      verdict = "failed";
      message = String(error).slice(0, 300);
      console.error(error);
    }
    console.log(JSON.stringify({ test: name, verdict, message }));
  }
}
