// The API description as a readable page: groups, fields, examples, and a form that sends a request.

import { el, field, milliseconds } from "./core/dom.js";
import { askForKey } from "./core/key.js";
import { call, json, onKey } from "./core/net.js";

const GROUPS = [
  ["OpenAI-compatible routes", (path, verb) => verb === "post" && path.startsWith("/v1/") && !path.includes("/requests/")],
  ["Native route", (path) => path === "/generate"],
  ["Requests", (path) => path.includes("/requests/")],
  ["Deployment", () => true],
];
const JSON_TYPE = "application/json";
const FORM_TYPE = "multipart/form-data";
const SHOWN_CHARS = 4000;

let schemas = {};

function examples(outputs) {
  return {
    "/generate": { text: "Hello there", output_modalities: outputs[0] ? [outputs[0]] : undefined, streaming: true },
    "/v1/chat/completions": { messages: [{ role: "user", content: "Hello there" }], max_tokens: 64 },
    "/v1/audio/speech": { input: "Hello there", response_format: "wav" },
    "/v1/images/generations": { prompt: "a small boat on a lake" },
    "/v1/images/edits": { prompt: "make it evening" },
    "/v1/audio/transcriptions": { response_format: "json" },
  };
}

async function start() {
  onKey(askForKey);
  const [description, models] = [await json("/openapi.json"), await json("/v1/models")];
  schemas = description.components.schemas;
  const given = examples(models.data[0].output_modalities);
  document.title = `${description.info.title} · API`;
  document.getElementById("title").textContent = description.info.title;
  const rest = Object.entries(description.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => ({ path, verb, operation })));
  const parts = [el("p", {}, `Version ${description.info.version}. ${sentence(description.info.description)}`)];
  for (const [name, takes] of GROUPS) {
    const found = rest.filter(({ path, verb }) => takes(path, verb));
    found.forEach((each) => rest.splice(rest.indexOf(each), 1));
    if (found.length) parts.push(el("h2", {}, name), ...found.map((each) => route(each, given)));
  }
  parts.push(el("h2", {}, "Types"), ...Object.entries(schemas).map(([name, schema]) => type(name, schema)));
  const main = document.getElementById("main");
  main.replaceChildren(...parts);
  window.addEventListener("hashchange", reveal);
  reveal();
  document.body.dataset.ready = "1";
}

/** Open the type that the address names. */
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); target.querySelector("summary").focus(); }
}

function sentence(text) {
  const words = (text || "").trim();
  return !words || /[.!?]$/.test(words) ? words : `${words}.`;
}

function route({ path, verb, operation }, given) {
  const content = operation.requestBody?.content || {};
  const kind = content[JSON_TYPE] ? JSON_TYPE : Object.keys(content)[0];
  const body = kind ? resolved(content[kind].schema) : null;
  const answers = Object.entries(operation.responses["200"]?.content || {});
  const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
  return el("details", { class: "card" },
    el("summary", {}, el("span", { class: "verb" }, verb.toUpperCase()), " ", el("code", {}, path), " ", el("span", {}, sentence(operation.summary))),
    part("Request", kind ? el("p", {}, "Content types: ", list(Object.keys(content)), ".") : null, body ? fields(body) : el("p", { class: "faint" }, "No body.")),
    part("Response", ...answers.map(([name, { schema }]) => el("p", {}, el("code", {}, name), ": ", ...shown(schema || {})))),
    errors.length ? part("Errors", el("p", {}, errors.map(([status, { description }], i) => [i ? ", " : "", el("code", {}, status), ` ${description}`]).flat(), ".")) : null,
    part("Example", el("div", { class: "snippet" }, el("pre", { tabindex: 0 }, example(path, verb, kind, given[path])))),
    tryOut(path, verb, kind, body, given[path] || {}));
}

function part(title, ...children) {
  return el("section", { class: "part" }, el("h3", {}, title), children);
}

function list(names) {
  return el("span", {}, names.flatMap((name, i) => [i ? ", " : "", el("code", {}, name)]));
}

function resolved(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

function fields(schema) {
  const needed = new Set(schema.required || []);
  const rows = Object.entries(schema.properties || {}).map(([name, each]) => el("tr", {}, el("td", {}, el("code", {}, name)), el("td", {}, ...shown(each)),
    el("td", {}, needed.has(name) ? "required" : each.default == null ? "" : String(each.default)), el("td", {}, sentence(each.description))));
  if (!rows.length) return el("p", { class: "faint" }, "No fields.");
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["Field", "Type", "Default", "Meaning"].map((name) => el("th", {}, name)))), el("tbody", {}, rows)));
}

function type(name, schema) {
  return el("details", { class: "card", id: name }, el("summary", {}, el("code", {}, name), " ", el("span", { class: "faint" }, sentence(schema.description))), fields(schema));
}

/** Return a short description of a type, as nodes. */
function shown(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return [el("a", { href: `#${encodeURIComponent(name)}` }, name)];
  }
  if (schema.anyOf) return schema.anyOf.filter((each) => each.type !== "null").flatMap((each, i) => [i ? " or " : "", ...shown(each)]);
  if (schema.enum) return schema.enum.flatMap((value, i) => [i ? ", " : "", el("code", {}, JSON.stringify(value))]);
  if (schema.type === "array" && schema.items) return ["list of ", ...shown(schema.items)];
  const kinds = [schema.type || "any"].flat().filter((kind) => kind !== "null");
  const bounds = [["from", schema.minimum ?? schema.exclusiveMinimum], ["to", schema.maximum]].filter(([, value]) => value != null).map(([word, value]) => ` ${word} ${value}`);
  return [kinds.join(" or ") + bounds.join("")];
}

function example(path, verb, kind, body) {
  const url = `${location.origin}${path.replace("{name}", "ID")}`;
  if (!kind) return `curl ${verb === "post" ? "-X POST " : ""}${url}`;
  if (kind === FORM_TYPE) {
    const file = path.endsWith("edits") ? "image=@picture.png" : "file=@sound.wav";
    return [`curl ${url} -F ${file}`, ...Object.entries(body || {}).map(([name, value]) => `-F '${name}=${value}'`)].join(" \\\n  ");
  }
  return `curl -N ${url} -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(body || {})}'`;
}

/** A form that sends the request and shows what comes back. */
function tryOut(path, verb, kind, schema, body) {
  const result = el("div", { "aria-live": "polite" });
  const name = path.includes("{name}") ? el("input", { required: true, autocomplete: "off" }) : null;
  const text = kind ? el("textarea", { rows: 6, spellcheck: "false" }) : null;
  if (text) text.value = JSON.stringify(body, null, 2);
  const wanted = kind === FORM_TYPE ? Object.entries(schema.properties).filter(([, each]) => (each.items || each).format === "binary").map(([each]) => each) : [];
  const files = wanted.map((each) => [each, el("input", { type: "file" })]);
  async function send(event) {
    event.preventDefault();
    result.replaceChildren(el("p", { class: "faint" }, "…"));
    try {
      const options = { method: verb.toUpperCase() };
      if (kind === FORM_TYPE) {
        options.body = new FormData();
        for (const [key, input] of files) if (input.files[0]) options.body.append(key, input.files[0]);
        for (const [key, value] of Object.entries(JSON.parse(text.value))) options.body.append(key, typeof value === "string" ? value : JSON.stringify(value));
      } else if (text) {
        JSON.parse(text.value);
        options.body = text.value;
        options.headers = { "Content-Type": JSON_TYPE };
      }
      const began = performance.now();
      const answer = await call(path.replace("{name}", encodeURIComponent(name?.value || "")), options);
      result.replaceChildren(...await received(answer, began));
    } catch (problem) {
      result.replaceChildren(el("p", { class: "error", role: "alert" }, problem.message));
    }
  }
  return el("form", { class: "part stack", onsubmit: send }, el("h3", {}, "Try it"), name ? field("Name", name) : null, files.map(([key, input]) => field(key, input)),
    text ? field(kind === FORM_TYPE ? "Other fields, as JSON" : "Body", text) : null, el("div", {}, el("button", { class: "primary", type: "submit" }, "Send")), result);
}

async function received(answer, began) {
  const kind = answer.headers.get("content-type") || "";
  const head = (size) => el("p", {}, el("strong", {}, `${answer.status} ${answer.statusText}`), ` · ${kind} · ${size} bytes · ${milliseconds(performance.now() - began)}`);
  const blob = await answer.blob();
  if (kind.startsWith("audio/") && !kind.startsWith("audio/pcm")) return [head(blob.size), el("audio", { controls: true, src: URL.createObjectURL(blob) })];
  if (!/json|text|event-stream/.test(kind)) return [head(blob.size)];
  const text = await blob.text();
  let pretty = text;
  if (kind.startsWith(JSON_TYPE)) try { pretty = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it came */ }
  const cut = pretty.length > SHOWN_CHARS ? `${pretty.slice(0, SHOWN_CHARS)}\n… ${pretty.length - SHOWN_CHARS} more characters` : pretty;
  return [head(blob.size), el("div", { class: "snippet" }, el("pre", { tabindex: 0 }, cut))];
}

start().catch((problem) => document.getElementById("main").replaceChildren(el("p", { class: "error", role: "alert" }, problem.message)));
