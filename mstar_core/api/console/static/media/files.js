// Files that a person adds to a request: chosen, dropped or recorded.

import { button, el } from "../core/dom.js";
import { microphone } from "./wav.js";

export const kindOf = (file) => file.type.split("/")[0];

/** A list of files with a drop zone and previews. kinds: of image, audio, video. extra: buttons beside the chooser. */
export class Media {
  constructor({ kinds, label, many = true, extra = [], onchange = () => {} }) {
    this.files = [];
    this.onchange = onchange;
    this.many = many;
    this.kinds = kinds;
    this.error = el("p", { class: "error", role: "alert" });
    this.thumbs = el("div", { class: "thumbs" });
    const input = el("input", { type: "file", accept: kinds.map((kind) => `${kind}/*`).join(), multiple: many, hidden: true, "aria-label": label, onchange: () => { this.add(...input.files); input.value = ""; } });
    const choose = button(many ? "Choose files" : "Choose a file", () => input.click(), { class: "small" });
    const buttons = [choose, ...extra, ...(kinds.includes("audio") ? [this.recordButton()] : [])];
    this.zone = el("div", { class: "drop stack", ondragover: (event) => { event.preventDefault(); this.zone.classList.add("over"); },
      ondragleave: () => this.zone.classList.remove("over"),
      ondrop: (event) => { event.preventDefault(); this.zone.classList.remove("over"); this.add(...event.dataTransfer.files); } },
    el("div", { class: "row" }, el("span", {}, label), ...buttons, input), this.thumbs, this.error);
  }

  add(...files) {
    const fitting = files.filter((file) => this.kinds.includes(kindOf(file)));
    this.error.textContent = fitting.length < files.length ? `Only ${this.kinds.join(", ")} files fit here.` : "";
    this.files = this.many ? [...this.files, ...fitting] : fitting.slice(0, 1).concat(fitting.length ? [] : this.files);
    this.draw();
  }

  clear() { this.files = []; this.draw(); }

  draw() {
    this.thumbs.replaceChildren(...this.files.map((file) => el("div", { class: `thumb ${kindOf(file) === "audio" ? "wide" : ""}` }, preview(file),
      el("button", { type: "button", class: "small", "aria-label": `Remove ${file.name}`, onclick: () => { this.files = this.files.filter((each) => each !== file); this.draw(); } }, "×"))));
    this.onchange(this.files);
  }

  recordButton() {
    let stop = null;
    const made = el("button", { type: "button", class: "small", onclick: async () => {
      this.error.textContent = "";
      try {
        if (stop) { const end = stop; stop = null; made.textContent = "Microphone"; this.add(await end()); }
        else { stop = await microphone(); made.textContent = "Stop recording"; }
      } catch (problem) {
        stop = null;
        made.textContent = "Microphone";
        this.error.textContent = `The microphone cannot be used: ${problem.message}`;
      }
    } }, "Microphone");
    return made;
  }
}

export function preview(file) {
  const src = URL.createObjectURL(file);
  switch (kindOf(file)) {
    case "image": return el("img", { src, alt: file.name });
    case "video": return el("video", { src, controls: true, muted: true, "aria-label": file.name });
    default: return el("audio", { src, controls: true, "aria-label": file.name });
  }
}
