// Chat: messages with images, audio and video; text and speech streamed back.

import { Pcm, Player, Wave, wav } from "./audio.js";
import { download, el, field, figures, milliseconds, select } from "./dom.js";
import { Media, kindOf, preview } from "./media.js";
import { checked, dataUrl, events, fromBase64, toBase64 } from "./net.js";

export const title = "Chat";
export const fits = (card) => card.endpoints.includes("/v1/chat/completions");

const AUDIO_RATE = 24000;

async function partOf(file) {
  if (kindOf(file) === "audio" && /wav|mpeg/.test(file.type)) {
    return { type: "input_audio", input_audio: { data: toBase64(new Uint8Array(await file.arrayBuffer())), format: file.type.includes("mpeg") ? "mp3" : "wav" } };
  }
  const name = `${kindOf(file)}_url`;
  return { type: name, [name]: { url: await dataUrl(file) } };
}

export function mount(card, session) {
  const kinds = ["image", "audio", "video"].filter((kind) => card.input_modalities.includes(kind));
  const canSpeak = card.output_modalities.includes("audio");
  const voices = card.parameters.properties.voice?.enum || card.parameters.properties.voice?.examples || [];
  const history = [];
  const talk = el("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: 0 });
  const text = el("textarea", { rows: 2, onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); } } });
  text.value = card.example || "";
  text.placeholder = "Enter sends, Shift+Enter starts a new line";
  const media = new Media({ kinds, label: `Add ${kinds.join(", ")}` });
  const speaks = el("input", { type: "checkbox", id: "chat-speaks" });
  const voice = select(voices, card.parameters.properties.voice?.default);
  const most = el("input", { type: "number", min: 1, value: 256 });
  const send = el("button", { class: "primary", type: "submit" }, "Send");
  const stop = el("button", { type: "button", disabled: true, onclick: () => session.cancel() }, "Stop");
  const fresh = el("button", { type: "button", onclick: () => { history.length = 0; talk.replaceChildren(); } }, "New chat");
  const shown = figures(canSpeak ? ["First output", "Text", "First audio"] : ["First output", "Text"]);
  const error = el("p", { class: "error", role: "alert" });

  function bubble(role, ...children) {
    const turn = el("div", { class: `turn ${role}` }, el("span", { class: "who" }, role === "user" ? "You" : card.id), ...children);
    talk.append(turn);
    talk.scrollTop = talk.scrollHeight;
    return turn;
  }

  async function submit(event) {
    event.preventDefault();
    const words = text.value.trim();
    if (!words && !media.files.length) return;
    error.textContent = "";
    const files = media.files;
    const content = [...await Promise.all(files.map(partOf)), ...(words ? [{ type: "text", text: words }] : [])];
    const message = { role: "user", content: files.length ? content : words };
    bubble("user", ...files.map(preview), words);
    text.value = "";
    media.clear();
    const isSpoken = canSpeak && speaks.checked;
    const body = { model: card.id, messages: [...history, message], stream: true, max_tokens: Number(most.value),
      ...(isSpoken ? { modalities: ["text", "audio"], audio: { ...(voices.length ? { voice: voice.value } : {}), format: "pcm16" } } : {}) };
    await answer(body, message, isSpoken);
  }

  async function answer(body, message, isSpoken) {
    const words = el("span");
    const turn = bubble("assistant", words);
    const wave = new Wave("Waveform of the answer");
    const player = new Player((played, isOver) => { wave.setPlayed(played); turn.dataset.played = played; if (isOver) turn.dataset.over = "1"; });
    if (isSpoken) { player.open(AUDIO_RATE); turn.append(wave.canvas); }
    const pcm = new Pcm();
    let pieces = 0;
    send.disabled = true;
    stop.disabled = false;
    try {
      await session.send({ path: "/v1/chat/completions", json: body, surface: title }, async (response, clock) => {
        await checked(response);
        for await (const { choices } of events(response)) {
          const delta = choices[0]?.delta || {};
          if (delta.content && delta.content !== "") {
            if (!pieces++) shown.set("First output", milliseconds(clock.first()));
            show(turn, words, delta.content);
            shown.set("Text", `${pieces} pieces, ${(pieces / (clock.now() / 1000)).toFixed(1)}/s`);
          }
          if (delta.audio?.data) {
            const samples = pcm.push(fromBase64(delta.audio.data));
            if (!wave.total) { clock.first(); shown.set("First audio", milliseconds(clock.now())); }
            wave.push(samples);
            player.push(samples);
          }
          talk.scrollTop = talk.scrollHeight;
        }
        if (isSpoken) player.end();
        if (wave.total) turn.append(download("Download WAV", "answer.wav", wav(wave.samples, AUDIO_RATE)));
      });
      history.push(message, { role: "assistant", content: words.textContent });
    } catch (problem) {
      player.stop();
      error.textContent = session.message(problem);
    } finally {
      send.disabled = false;
      stop.disabled = true;
      text.focus();
    }
  }

  const form = el("form", { class: "card stack", onsubmit: submit },
    el("h2", {}, "Chat"), talk, field("Message", text), kinds.length ? media.zone : null,
    el("div", { class: "fields" }, canSpeak ? el("label", { class: "check" }, speaks, "Speak the answer") : null, canSpeak && voices.length ? field("Voice", voice) : null, field("Most tokens", most),
      el("div", { class: "row" }, send, stop, fresh)),
    error, shown.list);
  return form;
}

/** Add a piece of an answer: text, or a list with a picture. */
function show(turn, words, content) {
  if (typeof content === "string") { words.append(content); return; }
  for (const part of content) {
    if (part.type === "text") words.append(part.text);
    else if (part.image_url?.url.startsWith("data:image/")) turn.append(el("img", { src: part.image_url.url, alt: "Picture by the model" }));
  }
}
