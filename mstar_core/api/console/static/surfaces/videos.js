// Videos: a prompt, optionally with a first image, in; progress while the job runs, and the film out.

import { button, download, el, field } from "../core/dom.js";
import { call, checked, json } from "../core/net.js";
import { Params } from "../core/params.js";
import { sampleButton } from "../core/samples.js";
import { Media } from "../media/files.js";

export const title = "Videos";
export const fits = (card) => card.endpoints.includes("/v1/videos");

const PATH = "/v1/videos";
const POLL_MS = 1000;
const FIRST = ["width", "height", "num_frames", "num_inference_steps", "seed"];

export function mount(card, session) {
  const prompt = el("textarea", { rows: 2, required: true });
  prompt.value = card.example || "A small red boat drifts on a calm lake, morning light";
  const sample = sampleButton("Sample", ({ outputs }) => outputs.includes("video"), (found) => {
    media.clear();
    media.add(...found.files);
    prompt.value = found.text;
    params.fill(found.params);
  });
  const media = new Media({ kinds: ["image"], label: "Drop the first image", extra: [sample] });
  const params = new Params(card, { first: FIRST });
  params.fill(card.example_params || {});
  const make = el("button", { class: "primary", type: "submit" }, "Make");
  const stop = button("Stop", () => cancel(), { disabled: true });
  const bar = el("progress", { max: 100, value: 0, "aria-label": "Progress of the video", hidden: true });
  const status = el("p", { class: "faint", "aria-live": "polite" });
  const error = el("p", { class: "error", role: "alert" });
  const out = el("div", { class: "stack" });
  let running = "";

  async function cancel() {
    if (running) await call(`${PATH}/${running}`, { method: "DELETE" });
    running = "";
  }

  async function submit(event) {
    event.preventDefault();
    error.textContent = status.textContent = "";
    out.replaceChildren();
    bar.hidden = false;
    make.disabled = true;
    stop.disabled = false;
    try {
      const form = new FormData();
      form.append("prompt", prompt.value);
      for (const [name, value] of Object.entries(params.values())) form.append(name, String(value));
      for (const file of media.files) form.append("input_reference", file, file.name || "image.png");
      const video = await json(PATH, { method: "POST", body: form });
      running = video.id;
      await follow(video.id);
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      bar.hidden = true;
      make.disabled = false;
      stop.disabled = true;
      running = "";
    }
  }

  async function follow(id) {
    while (running === id) {
      const video = await json(`${PATH}/${id}`);
      bar.value = video.progress;
      status.textContent = `${video.status.replace("_", " ")}, ${video.progress} %`;
      if (video.status === "failed") throw new Error(video.error?.message || "the video failed");
      if (video.status === "completed") {
        const film = await (await checked(await call(`${PATH}/${id}/content`))).blob();
        status.textContent = `${video.size}, ${video.seconds} s`;
        out.append(
          el("video", { class: "picture", src: URL.createObjectURL(film), controls: true, loop: true, muted: true, autoplay: true, "aria-label": prompt.value }),
          el("div", {}, download("Download MP4", "video.mp4", film)),
        );
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  return el("form", { class: "card stack", onsubmit: submit }, el("h2", {}, "Make a video"), field("Prompt", prompt),
    card.input_modalities.includes("image") ? media.zone : null, el("div", { class: "fields" }, params.fields, el("div", { class: "row" }, make, stop)), params.more,
    error, bar, status, out);
}
