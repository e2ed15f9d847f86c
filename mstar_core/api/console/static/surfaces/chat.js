// Chat: messages with images, audio and video; text, thinking, calls of functions and speech streamed back.

import { button, counted, el, field, figures, milliseconds } from "../core/dom.js";
import { checked, events, fromBase64 } from "../core/net.js";
import { Params } from "../core/params.js";
import { sampleButton, samples } from "../core/samples.js";
import { Shelf, onForget } from "../core/shelf.js";
import { Media } from "../media/files.js";
import { Player } from "../media/player.js";
import { Pcm, wav } from "../media/wav.js";
import { Wave } from "../media/wave.js";
import { callCards, takeCalls } from "./chat/calls.js";
import { Controls } from "./chat/controls.js";
import { sent } from "./chat/messages.js";
import { Transcript } from "./transcript.js";
import { Voices } from "./voices.js";

export const title = "Chat";
export const fits = (card) => card.endpoints.includes("/v1/chat/completions");

const AUDIO_RATE = 24000;
const LENGTH = 256;

const isSample = ({ outputs, text }) => outputs.includes("text") && text !== "";

export function mount(card, session) {
  const kinds = ["image", "audio", "video"].filter((kind) => card.input_modalities.includes(kind));
  const canSpeak = card.output_modalities.includes("audio");
  const voices = new Voices(card);
  const shelf = new Shelf(card.id, "chat", 1);
  const controls = new Controls(card, session.adapters);
  const talk = new Transcript(card.id, { onEdit: edit, onAgain: again, onResults: proceed });
  const text = el("textarea", { rows: 2, onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); } } });
  text.placeholder = "Enter sends, Shift+Enter starts a new line, Escape stops an answer";
  const media = new Media({ kinds, label: `Add ${kinds.join(", ")}`, extra: [sampleButton("Sample", isSample, use)] });
  const system = el("textarea", { rows: 2, placeholder: "Sent before the conversation" });
  const speaks = el("input", { type: "checkbox", id: "chat-speaks" });
  const params = new Params(card, { first: ["seed", "temperature", "max_output_tokens"] });
  params.set("max_output_tokens", LENGTH);
  const send = el("button", { class: "primary", type: "submit" }, "Send");
  const stop = button("Stop", () => session.cancel(), { disabled: true });
  const fresh = button("New chat", () => { session.cancel(); talk.show([]); shelf.clear(); error.textContent = ""; });
  const shown = figures(canSpeak ? ["First output", "Text", "First audio"] : ["First output", "Text"]);
  const error = el("p", { class: "error", role: "alert" });

  /** Take over a sample of the model. */
  function use(sample) {
    media.clear();
    media.add(...sample.files);
    text.value = sample.text;
    params.fill({ max_output_tokens: LENGTH, ...sample.params });
  }

  /** Return whether the controls make a request; otherwise say why not, before the conversation changes. */
  function usable() {
    try { controls.given(); error.textContent = ""; return true; } catch (problem) { error.textContent = problem.message; return false; }
  }

  async function submit(event) {
    event.preventDefault();
    const words = text.value.trim();
    if ((!words && !media.files.length) || send.disabled) return;
    if (talk.waiting()) { error.textContent = "Enter the results of the calls first, or regenerate the answer."; return; }
    if (!usable()) return;
    talk.add({ role: "user", text: words, files: media.files });
    text.value = "";
    media.clear();
    await answer();
  }

  async function edit(index, words) {
    if (send.disabled || (!words && !talk.messages[index].files?.length) || !usable()) return;
    talk.show([...talk.messages.slice(0, index), { ...talk.messages[index], text: words }]);
    await answer();
  }

  async function again(index) {
    if (send.disabled || !usable()) return;
    talk.show(talk.messages.slice(0, index));
    await answer();
  }

  /** Go on after the calls of an answer. */
  async function proceed(index, results) {
    if (send.disabled || !usable()) return;
    talk.show(talk.messages.slice(0, index + 1));
    talk.messages[index].results = results;
    talk.update(index);
    await answer();
  }

  /** Request the answer to the conversation so far. */
  async function answer() {
    error.textContent = "";
    shown.clear();
    const { model, ...given } = controls.given();
    send.disabled = true;
    stop.disabled = false;
    const isSpoken = canSpeak && speaks.checked;
    const before = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const { max_output_tokens: length, ...values } = params.values();
    const message = { role: "assistant", text: "", reasoning: "", calls: [], images: [], sound: null, note: "", isJson: Boolean(given.response_format) };
    const player = new Player((played, isOver) => { wave.setPlayed(played); turn.dataset.played = played; if (isOver) turn.dataset.over = "1"; });
    if (isSpoken) player.open(AUDIO_RATE);
    const { turn, words, thought, cards, index } = talk.open(message);
    const wave = new Wave("Waveform of the answer");
    if (isSpoken) turn.append(wave.canvas);
    const pcm = new Pcm();
    let pieces = 0, ended = "";
    try {
      const readsImages = kinds.includes("image") && card.output_modalities.includes("image");
      const messages = [...before, ...(await Promise.all(talk.messages.slice(0, index).map((each) => sent(each, { readsImages })))).flat()];
      const body = { model, messages, stream: true, ...given, ...values, ...(length ? { max_tokens: length } : {}),
        ...(isSpoken ? { modalities: ["text", "audio"], audio: { ...voices.given(), format: "pcm16" } } : {}) };
      const outcome = await session.send({ path: "/v1/chat/completions", json: body, surface: title }, async (response, clock) => {
        await checked(response);
        for await (const { choices } of events(response)) {
          const { delta = {}, finish_reason: reason } = choices[0] || {};
          if (reason) ended = reason;
          if (delta.reasoning_content) {
            if (!pieces++) shown.set("First output", milliseconds(clock.first()));
            message.reasoning += delta.reasoning_content;
            thought.hidden = false;
            thought.lastElementChild.append(delta.reasoning_content);
          }
          if (delta.tool_calls) {
            if (!pieces++) shown.set("First output", milliseconds(clock.first()));
            takeCalls(message.calls, delta.tool_calls);
            cards.replaceChildren(...callCards(message));
          }
          if (delta.content && delta.content !== "") {
            if (!pieces++) shown.set("First output", milliseconds(clock.first()));
            await take(message, words, delta.content);
            shown.set("Text", `${counted(pieces, "piece")}, ${(pieces / (clock.now() / 1000)).toFixed(1)}/s`);
          }
          if (delta.audio?.data) {
            const samples = pcm.push(fromBase64(delta.audio.data));
            if (!wave.total) { clock.first(); shown.set("First audio", milliseconds(clock.now())); }
            wave.push(samples);
            player.push(samples);
          }
          talk.follow();
        }
        if (isSpoken) player.end();
      });
      const { completion_tokens: tokens } = outcome.usage || {};
      if (tokens && !isSpoken && !message.images.length) shown.set("Text", `${counted(tokens, "token")} in ${counted(pieces, "piece")}`);
      if (outcome.finish_reason === "length") message.note = "The answer ended at its length limit.";
    } catch (problem) {
      player.stop();
      error.textContent = session.message(problem);
      message.note = problem.name === "AbortError" ? "Stopped." : "The request failed.";
    } finally {
      if (ended !== "tool_calls") message.calls = [];
      if (wave.total) message.sound = wav(wave.samples, AUDIO_RATE);
      const { played, over } = turn.dataset;
      talk.update(index);
      const drawn = talk.box.children[index];
      if (wave.total) drawn.insertBefore(wave.canvas, drawn.lastChild);
      player.onPlayed = (count, isOver) => { wave.setPlayed(count); drawn.dataset.played = count; if (isOver) drawn.dataset.over = "1"; };
      talk.follow();
      if (played) drawn.dataset.played = played;
      if (over) drawn.dataset.over = over;
      shelf.put({ id: 1, system: system.value, messages: talk.messages, controls: controls.kept() });
      send.disabled = false;
      stop.disabled = true;
      if (!talk.waiting()) text.focus({ preventScroll: true });
    }
  }

  onForget(() => talk.show([]));
  shelf.all().then(async ([kept]) => {
    if (kept && !talk.messages.length) { talk.show(kept.messages); system.value = kept.system; controls.fill(kept.controls); return; }
    const first = (await samples()).find(isSample);
    if (first && !text.value && !media.files.length && !talk.messages.length) use(first);
  });
  const stopByKey = (event) => { if (event.key === "Escape" && !stop.disabled) session.cancel(); };
  const form = el("form", { class: "card stack chat", onsubmit: submit, onkeydown: stopByKey },
    el("h2", {}, "Chat"), talk.box, kinds.length ? media.zone : null,
    el("div", { class: "composer" }, field("Message", text), el("div", { class: "row" }, send, stop)), error,
    el("div", { class: "fields" }, canSpeak ? el("label", { class: "check" }, speaks, "Speak the answer") : null, canSpeak ? voices.field : null, controls.fields, params.fields), ...controls.below,
    el("div", { class: "row folds" }, fresh, el("details", { class: "more" }, el("summary", {}, "System prompt"), field("System prompt", system)), controls.folds, params.more), shown.list);
  return form;
}

/** Add a piece of an answer: text, or a list with a picture. */
async function take(message, words, content) {
  for (const part of typeof content === "string" ? [{ type: "text", text: content }] : content) {
    if (part.type === "text") { words.append(part.text); message.text += part.text; }
    else if (part.image_url?.url.startsWith("data:image/")) {
      const [head, data] = part.image_url.url.split(",");
      const image = new Blob([fromBase64(data)], { type: head.slice(5).split(";")[0] });
      message.images.push(image);
      words.append(el("img", { src: URL.createObjectURL(image), alt: "Picture by the model" }));
    }
  }
}
