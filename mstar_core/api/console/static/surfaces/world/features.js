// Features of a clip, as colours.

import { el } from "../../core/dom.js";
import { numbers } from "../../core/net.js";
import { colours } from "../../drawing/components.js";
import { paint } from "../../drawing/pixels.js";
import { Clip } from "./clips.js";
import { taskForm } from "./task.js";

export const title = "Features of the clip";
export const fits = () => true;

export function mount(card, session) {
  const clip = new Clip(card);
  const start = async () => ({
    form: [...(await clip.files()).map((file) => ["files", file]), ["output_modalities", "tensor"], ["model_kwargs", JSON.stringify({ task: "encode", ...clip.given() })]],
    take: ({ modality, bytes, metadata: { name, dtype, shape, grid } }, out) => { if (modality === "tensor") out.append(...featuresOf(numbers(bytes, dtype), shape, grid, name)); },
  });
  return taskForm(session, title, { inputs: [clip.media.zone], fields: [clip.field], start });
}

/** Return the features of a clip: one picture per time of the grid. */
function featuresOf(rows, shape, grid, name) {
  const width = shape.at(-1), count = rows.length / width;
  const [height, across] = grid ? grid.slice(-2) : square(count);
  const times = count / (height * across);
  if (!Number.isInteger(times)) return [el("p", { class: "faint" }, `${name}: ${shape.join(" × ")}`)];
  const bytes = colours(rows, width);
  const picture = (t) => paint(el("canvas", { class: "pixels", role: "img", "aria-label": `Features at time ${t}` }), bytes.subarray(3 * t * height * across, 3 * (t + 1) * height * across), across, height);
  const pictures = Array.from({ length: times }, (_, t) => el("figure", {}, picture(t), el("figcaption", {}, `time ${t}`)));
  return [el("h3", {}, `${name}: ${shape.join(" × ")}`), el("p", { class: "faint" }, "Colours are the first three principal components over all frames."), el("div", { class: "plots" }, pictures)];
}

function square(count) {
  const side = Math.floor(Math.sqrt(count));
  return side * side === count ? [side, side] : [1, count];
}
