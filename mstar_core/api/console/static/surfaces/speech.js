// Speech: text in, sound that plays while it arrives, and the sounds made so far.

import { button, el, field, figures, milliseconds } from "../core/dom.js";
import { checked } from "../core/net.js";
import { Params } from "../core/params.js";
import { newId } from "../core/shelf.js";
import { Player } from "../media/player.js";
import { Pcm, wav } from "../media/wav.js";
import { Wave } from "../media/wave.js";
import { lengthHint } from "./length_hint.js";
import { Takes } from "./takes.js";
import { Voices } from "./voices.js";

export const title = "Speech";
export const fits = (card) => card.endpoints.includes("/v1/audio/speech");

export function mount(card, session) {
  const isAnswer = card.speech === "answer";
  const text = el("textarea", { rows: 3, required: true });
  text.value = card.example || (isAnswer ? "Tell me something about the sea." : "Hello there. This is the first sentence that I say.");
  const voices = new Voices(card);
  const params = new Params(card);
  const speak = el("button", { class: "primary", type: "submit" }, "Speak");
  const stop = button("Stop", () => session.cancel(), { disabled: true });
  const shown = figures(["First audio", "Real-time factor", "Length"]);
  const wave = new Wave("Waveform of the sound");
  const hint = el("p", { class: "hint", role: "status" });
  const error = el("p", { class: "error", role: "alert" });
  const takes = new Takes(card, (take) => {
    text.value = take.text;
    if (take.voice) voices.control.value = take.voice;
    params.fill({ ...take.values, seed: take.seed });
    text.focus();
  });
  let player = null;

  async function submit(event) {
    event.preventDefault();
    error.textContent = hint.textContent = "";
    shown.clear();
    wave.clear();
    takes.stop();
    player?.stop();
    player = new Player((played, isOver) => { wave.setPlayed(played); section.dataset.played = played; if (isOver) section.dataset.over = "1"; });
    section.dataset.played = 0;
    delete section.dataset.over;
    speak.disabled = true;
    stop.disabled = false;
    const values = params.values();
    const body = { model: card.id, input: text.value, ...voices.given(), ...values, response_format: "pcm", stream: true };
    let rate = 0;
    let outcome = {};
    let isWhole = false;
    try {
      outcome = await session.send({ path: "/v1/audio/speech", json: body, surface: title }, async (answer, clock) => {
        await checked(answer);
        rate = Number(answer.headers.get("x-sample-rate")) || 24000;
        player.open(rate);
        const pcm = new Pcm();
        const reader = answer.body.getReader();
        for (;;) {
          const { done, value } = await reader.read();
          if (done) break;
          const samples = pcm.push(value);
          if (!samples.length) continue;
          if (!wave.total) shown.set("First audio", milliseconds(clock.first()));
          player.push(samples);
          wave.push(samples);
          const seconds = wave.total / rate;
          shown.set("Length", `${seconds.toFixed(2)} s`);
          shown.set("Real-time factor", (clock.now() / 1000 / seconds).toFixed(2));
        }
        player.end();
      });
      isWhole = true;
    } catch (problem) {
      player.stop();
      error.textContent = session.message(problem);
    } finally {
      const seconds = wave.total / rate;
      if (isWhole && !isAnswer) hint.textContent = lengthHint(text.value, seconds || 0, outcome.finish_reason, card);
      // After Stop the sound so far can be played and saved as well.
      if (wave.total) takes.add({ id: newId(), text: text.value, voice: voices.given().voice, values, seed: outcome.seed ?? values.seed, seconds, sound: wav(wave.samples, rate), isWhole });
      speak.disabled = false;
      stop.disabled = true;
    }
  }

  const section = el("form", { class: "card stack", onsubmit: submit },
    el("h2", {}, isAnswer ? "Ask, and hear the answer" : "Say this"),
    field(isAnswer ? "Question" : "Text", text),
    el("div", { class: "fields" }, voices.field, params.fields, el("div", { class: "row" }, speak, stop)), params.more,
    error, hint, wave.canvas, shown.list, takes.box);
  return section;
}
