// Files that a person adds to a request: chosen, dropped, recorded or drawn as samples.

import { microphone } from "./audio.js";
import { el } from "./dom.js";

const COLOURS = [["#0f766e", "#fbbf24"], ["#4f46e5", "#f472b6"], ["#b45309", "#38bdf8"]];

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
    const input = el("input", { type: "file", accept: kinds.map((kind) => `${kind}/*`).join(), multiple: many, "aria-label": label, onchange: () => { this.add(...input.files); input.value = ""; } });
    const buttons = [...extra, ...(kinds.includes("audio") ? [this.recordButton()] : [])];
    this.zone = el("div", { class: "drop stack", ondragover: (event) => { event.preventDefault(); this.zone.classList.add("over"); },
      ondragleave: () => this.zone.classList.remove("over"),
      ondrop: (event) => { event.preventDefault(); this.zone.classList.remove("over"); this.add(...event.dataTransfer.files); } },
    el("div", { class: "row" }, el("span", {}, label), input, ...buttons), this.thumbs, this.error);
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
    const button = el("button", { type: "button", class: "small", onclick: async () => {
      this.error.textContent = "";
      try {
        if (stop) { const end = stop; stop = null; button.textContent = "Microphone"; this.add(await end()); }
        else { stop = await microphone(); button.textContent = "Stop recording"; }
      } catch (problem) {
        stop = null;
        button.textContent = "Microphone";
        this.error.textContent = `The microphone cannot be used: ${problem.message}`;
      }
    } }, "Microphone");
    return button;
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

/** Draw a scene: a ball over a horizon. phase: 0 to 1 moves the ball. */
function scene(context, size, index, phase) {
  const [low, high] = COLOURS[index % COLOURS.length];
  const sky = context.createLinearGradient(0, 0, 0, size);
  sky.addColorStop(0, high);
  sky.addColorStop(1, "#f1f5f9");
  context.fillStyle = sky;
  context.fillRect(0, 0, size, size);
  context.fillStyle = low;
  context.fillRect(0, size * 0.65, size, size);
  context.fillStyle = "#dc2626";
  context.beginPath();
  context.arc(size * (0.15 + 0.7 * phase), size * (0.55 - 0.3 * Math.sin(Math.PI * phase)), size * 0.09, 0, 7);
  context.fill();
}

/** Return a sample picture. */
export async function samplePicture(name, index = 0, size = 224, phase = 0.4) {
  const canvas = el("canvas", { width: size, height: size });
  scene(canvas.getContext("2d"), size, index, phase);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], `${name}.png`, { type: "image/png" });
}

/** Record a sample clip of a moving ball; takes as long as the clip. */
export async function sampleClip(seconds = 1.6, size = 256) {
  const canvas = el("canvas", { width: size, height: size });
  const context = canvas.getContext("2d");
  scene(context, size, 0, 0);
  const recorder = new MediaRecorder(canvas.captureStream(20), { mimeType: "video/webm;codecs=vp8" });
  const parts = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  const ended = new Promise((resolve) => { recorder.onstop = resolve; });
  recorder.start();
  const began = performance.now();
  for (let phase = 0; phase < 1; phase = (performance.now() - began) / 1000 / seconds) {
    scene(context, size, 0, phase);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  recorder.stop();
  await ended;
  return new File(parts, "clip.webm", { type: "video/webm" });
}
