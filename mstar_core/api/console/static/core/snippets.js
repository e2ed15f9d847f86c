// The same request as curl, Python, mstarctl and OpenAI code.

import { copyButton, download, el } from "./dom.js";
import { hasKey } from "./net.js";

const LONG = /[A-Za-z0-9+/=]{200,}/g;
const OPENAI = { "/v1/chat/completions": "chat.completions.create", "/v1/audio/speech": "audio.speech.create" };
const PLAIN = ["model", "messages", "stream", "modalities", "audio", "temperature", "max_tokens", "seed", "top_p", "input", "voice", "response_format", "tools", "reasoning_effort", "prompt", "n", "size"];

export function snippets(request, card) {
  const made = { curl: curl(request), Python: python(request), ...(sdkCall(request) ? { mstarctl: sdk(request) } : {}), ...(request.openai || OPENAI[request.path] ? { OpenAI: openai(request, card) } : {}) };
  const pre = el("pre", { tabindex: 0 });
  const names = Object.keys(made);
  const copy = copyButton(() => made[chosen]);
  let chosen = names[0];
  const note = el("p", { class: "faint" }, "Files are shortened here; Copy takes them whole.");
  const tabs = names.map((name) => el("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => show(name) }, name));
  function show(name) {
    chosen = name;
    pre.textContent = made[name].replaceAll(LONG, (data) => `${data.slice(0, 24)}…`);
    note.hidden = pre.textContent === made[name];
    pre.setAttribute("aria-label", `The request as ${name}`);
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(names[i] === name)));
  }
  show(names[0]);
  return el("div", { class: "stack" }, el("h3", {}, "This request as code"), el("div", { class: "row" }, tabs), el("div", { class: "snippet" }, pre, copy), note, filesOf(request));
}

/** Return buttons that save the files which the code opens. */
function filesOf({ form = [] }) {
  const files = form.map(([, value]) => value).filter((value) => value instanceof Blob);
  return files.length ? el("div", { class: "row" }, el("span", { class: "faint" }, "Its files:"), files.map((file) => download(file.name || "file", file.name || "file", file))) : null;
}

/** Return the body as code sends it: speech as a file that players open, not as raw samples. */
function saved({ json }) { return json?.response_format === "pcm" ? { ...json, response_format: "wav" } : json; }

const url = (path) => location.origin + path;
const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(request) {
  const { path, form } = request;
  const json = saved(request);
  const key = hasKey() ? ` -H "Authorization: Bearer $MSTAR_API_KEY"` : "";
  const out = json?.response_format === "wav" ? " -o speech.wav" : "";
  if (json) return `curl -N ${url(path)}${key} \\\n  -H 'Content-Type: application/json'${out} \\\n  -d ${shell(JSON.stringify(json, null, 1))}`;
  const parts = form.map(([name, value]) => (value instanceof Blob ? `-F ${shell(`${name}=@${value.name || "file"}`)}` : `--form-string ${shell(`${name}=${value}`)}`));
  return `curl -N ${url(path)}${key} \\\n  ${parts.join(" \\\n  ")}`;
}

/** Return a value as a Python literal. */
function literal(value, indent = "") {
  const inner = indent + "    ";
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) {
    if (value.every((each) => typeof each !== "object")) return `[${value.map((each) => literal(each)).join(", ")}]`;
    return `[\n${value.map((each) => `${inner}${literal(each, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    return `{\n${Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${literal(each, inner)},\n`).join("")}${indent}}`;
  }
  return JSON.stringify(value);
}

function python(request) {
  const { path, form } = request;
  const json = saved(request);
  const key = hasKey() ? `, headers={"Authorization": f"Bearer {os.environ['MSTAR_API_KEY']}"}` : "";
  const head = `${hasKey() ? "import os\n" : ""}import httpx\n\n`;
  const end = json?.response_format === "wav" ? `open("speech.wav", "wb").write(answer.content)` : "print(answer.text)";
  if (json) return `${head}body = ${literal(json)}\nanswer = httpx.post("${url(path)}", json=body, timeout=600${key})\nanswer.raise_for_status()\n${end}\n`;
  const data = Object.fromEntries(form.filter(([, value]) => !(value instanceof Blob)));
  const files = form.filter(([, value]) => value instanceof Blob).map(([name, value]) => `    (${JSON.stringify(name)}, open(${JSON.stringify(value.name || "file")}, "rb")),\n`);
  const given = files.length ? `files = [\n${files.join("")}]\n` : "";
  return `${head}data = ${literal(data)}\n${given}answer = httpx.post("${url(path)}", data=data${given ? ", files=files" : ""}, timeout=600${key})\nanswer.raise_for_status()\nprint(answer.text)\n`;
}

const SPOKEN = ["model", "input", "response_format", "stream"];

/** Return the call of MStarClient for a request and its arguments, null if there is none: chat with a history. */
function sdkCall({ path, json, form }) {
  if (path === "/v1/audio/speech") {
    const given = Object.entries(json).filter(([name]) => !SPOKEN.includes(name)).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
    return { name: "tts", lines: [`    ${literal(json.input)},\n`, ...given], end: `answer.to_wav("speech.wav")` };
  }
  if (path !== "/generate" || !form) return null;
  const value = Object.fromEntries(form.filter(([, each]) => !(each instanceof Blob)));
  const files = form.filter(([, each]) => each instanceof Blob).map(([, each]) => each);
  const kinds = { image: "images", audio: "audio", video: "video" };
  const media = Object.entries(kinds).map(([kind, name]) => [name, files.filter((file) => file.type.startsWith(kind)).map((file) => file.name || "file")]).filter(([, names]) => names.length);
  const lines = [["output_modalities", (value.output_modalities || "text").split(",")], ...(value.text ? [["text", value.text]] : []), ...media,
    ...Object.entries(JSON.parse(value.model_kwargs || "{}"))].map(([name, each]) => `    ${name}=${literal(each, "    ")},\n`);
  return { name: "generate", lines, end: value.output_modalities === "image" ? `answer.save_image("image.png")` : "print(answer)" };
}

function sdk(request) {
  const { name, lines, end } = sdkCall(request);
  const key = hasKey() ? `, api_key=os.environ["MSTAR_API_KEY"]` : "";
  return `${hasKey() ? "import os\n" : ""}from mstar_core import MStarClient\n\nclient = MStarClient("${location.origin}"${key})\nanswer = client.${name}(\n${lines.join("")})\n${end}\n`;
}

function openai(request, card) {
  const { call, body, files = {} } = request.openai || { call: OPENAI[request.path], body: saved(request) };
  const isSpeech = call === "audio.speech.create";
  const known = Object.entries({ model: card.id, ...body }).filter(([name]) => PLAIN.includes(name) && !(isSpeech && name === "stream"));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !PLAIN.includes(name) || (isSpeech && name === "stream")));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  for (const [name, file] of Object.entries(files)) lines.push(`    ${name}=open(${JSON.stringify(file.name)}, "rb"),\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},\n`);
  const key = hasKey() ? `os.environ["MSTAR_API_KEY"]` : `"none"`;
  const head = `${hasKey() ? "import os\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${key})\n`;
  if (isSpeech) return `${head}with client.audio.speech.with_streaming_response.create(\n${lines.join("")}) as answer:\n    answer.stream_to_file("speech.wav")\n`;
  const end = body.stream ? "for event in answer:\n    print(event)\n" : "print(answer)\n";
  return `${head}answer = client.${call}(\n${lines.join("")})\n${end}`;
}
