// Settings of a spoken conversation: voice, instructions, detection of turns, parameters of the model.

import { el, field } from "../../core/dom.js";
import { Params } from "../../core/params.js";
import { Voices } from "../voices.js";

const TURNS = [["server_vad", "after a silence"], ["semantic_vad", "after a sentence and a silence"], ["none", "when I release the button"]];

export class Settings {
  /** hears: the model takes sound. onChange: called after each change. */
  constructor(card, { hears, onChange }) {
    this.card = card;
    this.hears = hears;
    this.converses = card.endpoints.includes("/v1/chat/completions");
    this.voices = new Voices(card);
    this.params = new Params(card);
    this.turns = el("select", {}, TURNS.map(([value, label]) => el("option", { value }, label)));
    this.instructions = el("textarea", { rows: 2, placeholder: "Sent before the conversation" });
    this.hint = el("p", { class: "hint", hidden: true }, "The server cannot detect speech: hold the button while you speak.");
    const canSpeak = card.output_modalities.includes("audio");
    this.fields = el("div", { class: "fields", onchange: onChange }, canSpeak ? this.voices.field : null, hears ? field("My turn ends", this.turns) : null, this.params.fields);
    this.folds = el("div", { class: "row folds", onchange: onChange },
      this.converses ? el("details", { class: "more" }, el("summary", {}, "Instructions"), field("Instructions", this.instructions)) : null, this.params.more);
  }

  get isHeld() { return this.turns.value === "none"; }

  /** Follow what the server offers: without detection of speech, turns end by the button. */
  follow(session) {
    if (!this.hears || session.audio.input.turn_detection) return;
    this.turns.value = "none";
    this.turns.disabled = true;
    this.hint.hidden = false;
  }

  /** Return the fields of the session. An empty parameter returns to the model's default. */
  session() {
    const { max_output_tokens: limit, ...values } = Object.fromEntries(this.params.controls.map(({ name }) => [name, null]).concat(Object.entries(this.params.values())));
    const transcribes = this.card.endpoints.includes("/v1/audio/transcriptions");
    const heard = { turn_detection: this.isHeld ? null : { type: this.turns.value }, ...(transcribes ? { transcription: { model: this.card.id } } : {}) };
    return { type: "realtime", ...values, ...(limit === undefined ? {} : { max_output_tokens: limit ?? "inf" }),
      ...(this.converses ? { instructions: this.instructions.value.trim() } : {}),
      audio: { ...(this.hears ? { input: heard } : {}), output: this.voices.given() } };
  }
}
