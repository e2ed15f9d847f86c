// Features of a clip, as colours.

import { button, el, figures, milliseconds } from "../core/dom.js";
import { checked, numbers, outputs } from "../core/net.js";
import { colours } from "../drawing/components.js";
import { frame } from "../drawing/plot.js";
import { Clip } from "./clips.js";

export const title = "Features of the clip";
export const fits = () => true;

export function mount(card, session) {
  const clip = new Clip(card);
  const run = el("button", { class: "primary", type: "submit" }, "Run");
  const stop = button("Stop", () => session.cancel(), { disabled: true });
  const out = el("div", { class: "stack" });
  const shown = figures(["First output", "Outputs"]);
  const error = el("p", { class: "error", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    error.textContent = "";
    shown.clear();
    out.replaceChildren();
    run.disabled = true;
    stop.disabled = false;
    let count = 0;
    try {
      const files = await clip.files();
      const form = [...files.map((file) => ["files", file]), ["output_modalities", "tensor"], ["model_kwargs", JSON.stringify({ task: "encode", ...clip.given() })]];
      await session.send({ path: "/generate", form, surface: title }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) {
          shown.set("First output", milliseconds(clock.first()));
          shown.set("Outputs", ++count);
          const { name, dtype, shape, grid } = item.metadata;
          if (item.modality === "tensor") out.append(...featuresOf(numbers(item.bytes, dtype), shape, grid, name));
        }
      });
    } catch (problem) {
      error.textContent = problem.constructor === Error ? problem.message : session.message(problem);
    } finally {
      run.disabled = false;
      stop.disabled = true;
    }
  }

  return el("form", { class: "stack", onsubmit: submit }, clip.media.zone, el("div", { class: "fields" }, clip.field, el("div", { class: "row" }, run, stop)), error, out, shown.list);
}

/** Return the features of a clip: one picture per time of the grid. */
function featuresOf(rows, shape, grid, name) {
  const width = shape.at(-1), count = rows.length / width;
  const [height, across] = grid ? grid.slice(-2) : square(count);
  const times = count / (height * across);
  if (!Number.isInteger(times)) return [el("p", { class: "faint" }, `${name}: ${shape.join(" × ")}`)];
  const bytes = colours(rows, width);
  const pictures = Array.from({ length: times }, (_, t) => el("figure", {}, frame(bytes.subarray(3 * t * height * across, 3 * (t + 1) * height * across), height, across, `Features at time ${t}`), el("figcaption", {}, `time ${t}`)));
  return [el("h3", {}, `${name}: ${shape.join(" × ")}`), el("p", { class: "faint" }, "Colours are the first three principal components over all frames."), el("div", { class: "plots" }, pictures)];
}

function square(count) {
  const side = Math.floor(Math.sqrt(count));
  return side * side === count ? [side, side] : [1, count];
}
