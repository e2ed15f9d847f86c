// Messages of a transcript in the form of the chat route.

import { dataUrl, toBase64 } from "../../core/net.js";
import { kindOf } from "../../media/files.js";

async function partOf(file) {
  if (kindOf(file) === "audio" && /wav|mpeg/.test(file.type)) {
    return { type: "input_audio", input_audio: { data: toBase64(new Uint8Array(await file.arrayBuffer())), format: file.type.includes("mpeg") ? "mp3" : "wav" } };
  }
  const name = `${kindOf(file)}_url`;
  return { type: name, [name]: { url: await dataUrl(file) } };
}

/** Return the content of a message: its text, or parts if it has files. */
async function contentOf(text, files) {
  if (!files.length) return text;
  return [...await Promise.all(files.map(partOf)), ...(text ? [{ type: "text", text }] : [])];
}

/**
 * Return a message of the transcript as the API has it: one message, and one for each result of a function.
 *
 * readsImages: the model reads pictures, those of its earlier answers too.
 */
export async function sent({ role, text, files = [], images = [], reasoning = "", calls = [], results = {} }, { readsImages = false } = {}) {
  if (role === "user") return [{ role, content: await contentOf(text, files) }];
  const pictures = readsImages ? images : [];
  const made = { role, content: await contentOf(text, pictures), ...(reasoning ? { reasoning_content: reasoning } : {}) };
  if (!calls.length) return [made];
  const tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return [{ ...made, content: made.content || null, tool_calls }, ...calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results[id] ?? "" }))];
}
