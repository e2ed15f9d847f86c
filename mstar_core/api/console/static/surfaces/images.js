// Images: a prompt, optionally with images to edit, in; steps, partial images and the image out.

import { button, download, el, field, figures, milliseconds } from "../core/dom.js";
import { checked, outputs } from "../core/net.js";
import { Params } from "../core/params.js";
import { sampleButton } from "../core/samples.js";
import { newId } from "../core/shelf.js";
import { Media } from "../media/files.js";
import { Gallery } from "./gallery.js";

export const title = "Images";
export const fits = (card) => card.output_modalities.includes("image");

const PARTIALS = 3;
const FIRST = ["width", "height", "num_timesteps", "seed"];

export function mount(card, session) {
  const canPreview = Boolean(card.parameters.properties.partial_images);
  const canEdit = card.input_modalities.includes("image");
  const prompt = el("textarea", { rows: 2, required: true });
  prompt.value = card.example || "A small red boat on a calm lake, morning light";
  const sample = sampleButton("Sample", ({ outputs }) => outputs.includes("image"), (found) => {
    media.clear();
    media.add(...found.files);
    prompt.value = found.text;
    params.fill(found.params);
  });
  const media = new Media({ kinds: ["image"], label: "Drop an image to edit it", extra: [sample], onchange: (files) => { make.textContent = files.length ? "Edit" : "Make"; } });
  const params = new Params(card, { first: FIRST });
  const make = el("button", { class: "primary", type: "submit" }, "Make");
  const stop = button("Stop", () => session.cancel(), { disabled: true });
  const bar = el("progress", { max: 1, value: 0, "aria-label": "Steps of the image", hidden: true });
  const stepText = el("p", { class: "faint", "aria-live": "polite" });
  const out = el("div", { class: "stack" });
  const shown = figures(["First picture", "Done after"]);
  const error = el("p", { class: "error", role: "alert" });
  const gallery = new Gallery(card, (item) => { prompt.value = item.prompt; params.fill({ ...item.values, seed: item.seed }); prompt.focus(); });

  async function submit(event) {
    event.preventDefault();
    error.textContent = stepText.textContent = "";
    shown.clear();
    out.replaceChildren();
    bar.hidden = false;
    bar.removeAttribute("value");
    make.disabled = true;
    stop.disabled = false;
    const values = params.values();
    const extras = { ...values, ...(canPreview ? { partial_images: PARTIALS } : {}) };
    const isEdit = media.files.length > 0;
    const form = [...media.files.map((file) => ["files", file]), ["text", prompt.value], ["output_modalities", "image"], ["stream_events", "full"], ["model_kwargs", JSON.stringify(extras)]];
    const openai = { call: isEdit ? "images.edit" : "images.generate", body: { prompt: prompt.value, ...(canPreview ? { stream: true, partial_images: PARTIALS } : {}), ...values }, files: isEdit ? { image: media.files[0] } : {} };
    const words = prompt.value;
    const made = [];
    try {
      const outcome = await session.send({ path: "/generate", form, surface: isEdit ? "Edit" : "Image", openai }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) take(item, clock, made);
      });
      for (const each of made) gallery.add({ id: newId(), prompt: words, values, seed: outcome.seed ?? values.seed, ...each });
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      bar.hidden = true;
      make.disabled = false;
      stop.disabled = true;
    }
  }

  function take({ modality, bytes, metadata }, clock, made) {
    if (modality === "progress") {
      bar.max = metadata.steps;
      bar.value = metadata.step;
      stepText.textContent = `Step ${metadata.step} of ${metadata.steps}`;
    } else if (modality === "text") {
      out.append(el("p", {}, new TextDecoder().decode(bytes)));
    } else if (modality === "image" || modality === "partial_image") {
      const isDone = modality === "image";
      const picture = new Blob([bytes], { type: "image/png" });
      shown.set(isDone ? "Done after" : "First picture", milliseconds(isDone ? clock.now() : clock.first()));
      if (isDone) clock.first();
      out.querySelector("img.partial")?.remove();
      out.append(el("img", { class: `picture${isDone ? "" : " partial"}`, src: URL.createObjectURL(picture), alt: isDone ? prompt.value : "The image so far" }));
      if (isDone) {
        stepText.textContent = `${metadata.width} × ${metadata.height}`;
        out.append(el("div", {}, download("Download PNG", "image.png", picture)));
        made.push({ picture, width: metadata.width, height: metadata.height });
      }
    }
  }

  return el("form", { class: "card stack", onsubmit: submit }, el("h2", {}, canEdit ? "Make or edit an image" : "Make an image"), field("Prompt", prompt),
    canEdit ? media.zone : null, el("div", { class: "fields" }, params.fields, el("div", { class: "row" }, make, stop)), params.more,
    error, bar, stepText, out, shown.list, gallery.box);
}
