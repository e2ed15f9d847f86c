// Speech: text in, sound that plays while it arrives.

import { download, el, field, figures, milliseconds, select } from "./dom.js";
import { Pcm, Player, Wave, wav } from "./audio.js";
import { checked } from "./net.js";

export const title = "Speech";
export const fits = (card) => card.endpoints.includes("/v1/audio/speech");

export function mount(card, session) {
  // A parameter that accepts other values too lists the known ones as examples.
  const voices = card.parameters.properties.voice?.enum || card.parameters.properties.voice?.examples || [];
  const isAnswer = card.speech === "answer";
  const text = el("textarea", { rows: 3, required: true });
  text.value = card.example || (isAnswer ? "Tell me something about the sea." : "Hello there. This is the first sentence that I say.");
  const voice = select(voices, card.parameters.properties.voice?.default);
  const play = el("button", { class: "primary", type: "submit" }, "Play");
  const stop = el("button", { type: "button", disabled: true, onclick: () => session.cancel() }, "Stop");
  const shown = figures(["First audio", "Real-time factor", "Length"]);
  const wave = new Wave("Waveform of the sound");
  const file = el("span");
  const error = el("p", { class: "error", role: "alert" });
  let player = null;

  async function speak(event) {
    event.preventDefault();
    error.textContent = "";
    file.replaceChildren();
    wave.clear();
    player?.stop();
    player = new Player((played, isOver) => { wave.setPlayed(played); section.dataset.played = played; if (isOver) section.dataset.over = "1"; });
    section.dataset.played = 0;
    delete section.dataset.over;
    play.disabled = true;
    stop.disabled = false;
    const body = { model: card.id, input: text.value, ...(voices.length ? { voice: voice.value } : {}), response_format: "pcm", stream: true };
    let sampleRate = 0;
    try {
      await session.send({ path: "/v1/audio/speech", json: body, surface: title }, async (answer, clock) => {
        await checked(answer);
        const rate = Number(answer.headers.get("x-sample-rate")) || 24000;
        player.open(rate);
        sampleRate = rate;
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
        return { "Real-time factor": wave.total ? (clock.now() / 1000 / (wave.total / rate)).toFixed(2) : "–" };
      });
    } catch (problem) {
      player.stop();
      error.textContent = session.message(problem);
    } finally {
      // After Stop the sound so far can be saved as well.
      if (wave.total) file.replaceChildren(download("Download WAV", "speech.wav", wav(wave.samples, sampleRate)));
      play.disabled = false;
      stop.disabled = true;
    }
  }

  const section = el("form", { class: "card stack", onsubmit: speak },
    el("h2", {}, isAnswer ? "Ask, and hear the answer" : "Say this"),
    field(isAnswer ? "Question" : "Text", text),
    el("div", { class: "fields" }, voices.length ? field("Voice", voice) : null, el("div", { class: "row" }, play, stop, file)),
    error, wave.canvas, shown.list);
  return section;
}
