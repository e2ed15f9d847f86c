// Images: a prompt, optionally with images to edit, in; steps, partial images and the image out.

import { download, el, field, figures, milliseconds } from "./dom.js";
import { Media } from "./media.js";
import { checked, outputs } from "./net.js";

export const title = "Images";
export const fits = (card) => card.output_modalities.includes("image");

const PARTIALS = 3;

export function mount(card, session) {
  const known = card.parameters.properties;
  const canEdit = card.input_modalities.includes("image");
  const prompt = el("textarea", { rows: 2, required: true });
  prompt.value = card.example || "A small red boat on a calm lake, morning light";
  const media = new Media({ kinds: ["image"], label: "Drop an image to edit it", onchange: (files) => { make.textContent = files.length ? "Edit" : "Make"; } });
  const given = ["width", "height", "num_timesteps", "seed"].filter((name) => known[name]).map((name) => {
    const { minimum: min, maximum: max, default: value } = known[name];
    return [name, el("input", { type: "number", min, max: Math.min(max ?? 1e9, 1e9), placeholder: value ?? "auto" })];
  });
  const make = el("button", { class: "primary", type: "submit" }, "Make");
  const stop = el("button", { type: "button", disabled: true, onclick: () => session.cancel() }, "Stop");
  const bar = el("progress", { max: 1, value: 0, "aria-label": "Steps of the image", hidden: true });
  const stepText = el("p", { class: "faint", "aria-live": "polite" });
  const out = el("div", { class: "stack" });
  const shown = figures(["First picture", "Done after"]);
  const error = el("p", { class: "error", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    error.textContent = stepText.textContent = "";
    out.replaceChildren();
    bar.hidden = false;
    bar.removeAttribute("value");
    make.disabled = true;
    stop.disabled = false;
    const values = Object.fromEntries(given.filter(([, input]) => input.value).map(([name, input]) => [name, Number(input.value)]));
    const extras = { ...values, ...(known.partial_images ? { partial_images: PARTIALS } : {}) };
    const form = [...media.files.map((file) => ["files", file]), ["text", prompt.value], ["output_modalities", "image"], ["stream_events", "full"], ["model_kwargs", JSON.stringify(extras)]];
    const isEdit = media.files.length > 0;
    const openai = { call: isEdit ? "images.edit" : "images.generate", body: { prompt: prompt.value, ...(known.partial_images ? { stream: true, partial_images: PARTIALS } : {}), ...values }, files: isEdit ? { image: media.files[0] } : {} };
    try {
      await session.send({ path: "/generate", form, surface: isEdit ? "Edit" : "Image", openai }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) take(item, clock);
      });
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      bar.hidden = true;
      make.disabled = false;
      stop.disabled = true;
    }
  }

  function take({ modality, bytes, metadata }, clock) {
    if (modality === "progress") {
      bar.max = metadata.steps;
      bar.value = metadata.step;
      stepText.textContent = `Step ${metadata.step} of ${metadata.steps}`;
    } else if (modality === "text") {
      out.append(el("p", {}, new TextDecoder().decode(bytes)));
    } else if (modality === "image" || modality === "partial_image") {
      const isDone = modality === "image";
      const blob = new Blob([bytes], { type: "image/png" });
      shown.set(isDone ? "Done after" : "First picture", milliseconds(isDone ? clock.now() : clock.first()));
      if (isDone) clock.first();
      out.querySelector("img.partial")?.remove();
      out.append(el("img", { class: `picture${isDone ? "" : " partial"}`, src: URL.createObjectURL(blob), alt: isDone ? prompt.value : "The image so far" }));
      if (isDone) { stepText.textContent = `${metadata.width} × ${metadata.height}`; out.append(el("div", {}, download("Download PNG", "image.png", blob))); }
    }
  }

  return el("form", { class: "card stack", onsubmit: submit }, el("h2", {}, canEdit ? "Make or edit an image" : "Make an image"), field("Prompt", prompt),
    canEdit ? media.zone : null, el("div", { class: "fields" }, given.map(([name, input]) => field(name.replaceAll("_", " "), input)), el("div", { class: "row" }, make, stop)),
    error, bar, stepText, out, shown.list);
}
