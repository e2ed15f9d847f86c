// The choice of a voice, and a preview of the chosen one.

import { button, el, field, select } from "../core/dom.js";
import { call, checked } from "../core/net.js";

const PREVIEW = "Hello, this is my voice.";

/** Voices of a model. A parameter that accepts other values too lists the known ones as examples. */
export class Voices {
  constructor(card) {
    const known = card.parameters.properties.voice;
    this.card = card;
    this.names = known?.enum || known?.examples || [];
    this.control = select(this.names, known?.default);
    this.error = el("p", { class: "error", role: "alert" });
    this.button = button("Preview", () => this.preview(), { class: "small" });
    const canPreview = card.endpoints.includes("/v1/audio/speech");
    this.field = this.names.length ? el("div", { class: "row voice" }, field("Voice", this.control), canPreview ? this.button : null, this.error) : null;
  }

  /** Return the member of a request, empty for a model without voices. */
  given() { return this.names.length ? { voice: this.control.value } : {}; }

  /** Play a short sentence, or the first words of the model's own example. */
  async preview() {
    this.button.disabled = true;
    this.error.textContent = "";
    const body = { model: this.card.id, input: this.card.example || PREVIEW, ...this.given(), seed: 1, response_format: "wav" };
    try {
      const answer = await checked(await call("/v1/audio/speech", { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } }));
      await new Audio(URL.createObjectURL(await answer.blob())).play();
    } catch (problem) {
      this.error.textContent = problem.message;
    } finally {
      this.button.disabled = false;
    }
  }
}
