// Requests to the deployment: the API key in memory, streams of lines and events, base64.

let key = "";
let askKey = async () => "";

/** Register the dialog that asks for a key. */
export function onKey(ask) { askKey = ask; }
export function hasKey() { return key !== ""; }

function headersWith(headers) {
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

/** Fetch a path of the deployment. A 401 asks for the key and repeats the request. */
export async function call(path, options = {}) {
  for (let wrong = false; ; wrong = true) {
    const answer = await fetch(path, { ...options, headers: headersWith(options.headers || {}) });
    if (answer.status !== 401) return answer;
    key = await askKey(wrong && key !== "");
  }
}

/** A problem in words for the user. code: the server's, if it has one. */
export class Failure extends Error {
  constructor(message, code) { super(message); this.code = code; }
}

/** Return the JSON of a path. Throws Failure with the server's message. */
export async function json(path, options) {
  return (await checked(await call(path, options))).json();
}

export async function checked(answer) {
  if (answer.ok) return answer;
  let error = {};
  try { error = (await answer.json()).error || {}; } catch { /* not JSON: the status has to do */ }
  throw new Failure(error.message || `the server answered ${answer.status}`, error.code);
}

/** Turn the description of a request into the arguments of fetch. */
export function optionsOf(request, id, signal) {
  const headers = { "X-Request-ID": id };
  if (request.json) {
    return { method: "POST", body: JSON.stringify(request.json), headers: { ...headers, "Content-Type": "application/json" }, signal };
  }
  const form = new FormData();
  for (const [name, value] of request.form) {
    if (value instanceof Blob) form.append(name, value, value.name || "file");
    else form.append(name, value);
  }
  return { method: "POST", body: form, headers, signal };
}

export async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

/** Yield the outputs of /generate, with `bytes`. An error line throws Failure. */
export async function* outputs(answer) {
  const split = new Map();
  for await (const line of lines(answer)) {
    if (!line.trim()) continue;
    const item = JSON.parse(line);
    item.bytes = fromBase64(item.data);
    if (item.modality === "error") throw new Failure(new TextDecoder().decode(item.bytes), item.metadata.code);
    const { parts, name } = item.metadata;
    if (parts > 1) {
      const pieces = split.get(name) || [];
      pieces.push(item.bytes);
      split.set(name, pieces);
      if (pieces.length < parts) continue;
      split.delete(name);
      item.bytes = joined(pieces, Uint8Array);
    }
    yield item;
  }
}

/** Yield the JSON of server-sent events. An error event throws Failure. */
export async function* events(answer) {
  for await (const line of lines(answer)) {
    if (!line.startsWith("data: ")) continue;
    const text = line.slice(6);
    if (text === "[DONE]") return;
    const item = JSON.parse(text);
    if (item.error) throw new Failure(item.error.message, item.error.code);
    yield item;
  }
}

export function fromBase64(text) {
  const binary = atob(text || "");
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export function toBase64(bytes) {
  let binary = "";
  for (let i = 0; i < bytes.length; i += 32768) binary += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(binary);
}

export async function dataUrl(blob) {
  return `data:${(blob.type || "application/octet-stream").split(";")[0]};base64,${toBase64(new Uint8Array(await blob.arrayBuffer()))}`;
}

export function joined(pieces, Kind) {
  const whole = new Kind(pieces.reduce((size, piece) => size + piece.length, 0));
  let at = 0;
  for (const piece of pieces) { whole.set(piece, at); at += piece.length; }
  return whole;
}

/** Return the numbers of an output as floats. dtype: of its metadata. */
export function numbers(bytes, dtype) {
  const view = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  if (dtype === "float32") return new Float32Array(view);
  if (dtype === "float64") return Float32Array.from(new Float64Array(view));
  if (dtype === "int64") return Float32Array.from(new BigInt64Array(view), Number);
  if (dtype === "int32") return Float32Array.from(new Int32Array(view));
  throw new Failure(`numbers of type ${dtype} cannot be drawn`);
}
