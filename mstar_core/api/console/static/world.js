// World model: a clip in; its features as colours, and the energies of candidate actions as a plot.

import { el, field, figures, milliseconds, select } from "./dom.js";
import { Media, sampleClip, samplePicture } from "./media.js";
import { checked, numbers, outputs } from "./net.js";
import { colours, frame, line } from "./plot.js";

export const title = "World model";
export const fits = (card) => card.output_modalities.includes("tensor") && card.input_modalities.includes("video") && !card.endpoints.includes("/v1/chat/completions");

const FEATURES = "Features of the clip";
const CANDIDATES = "Energies of candidates";
const [COUNT, HORIZON, WIDTH, REACH] = [8, 2, 7, 0.05];

/** Return candidates of actions: [count, horizon, 7], each a small move of the arm. */
function candidates() {
  return Array.from({ length: COUNT }, (_, k) => Array.from({ length: HORIZON }, () => Array.from({ length: WIDTH }, (_, axis) =>
    (axis < 3 ? Number((REACH * Math.sin(1 + 2.1 * k + axis)).toFixed(4)) : 0))));
}

export function mount(card, session) {
  const isArm = Boolean(card.parameters.properties.actions);
  const sample = el("button", { type: "button", class: "small", onclick: async () => { sample.disabled = true; media.add(await sampleClip()); sample.disabled = false; } }, "Sample clip");
  const media = new Media({ kinds: ["video"], many: false, label: "A clip", extra: [sample] });
  const sampleGoal = el("button", { type: "button", class: "small", onclick: async () => goal.add(await samplePicture("goal", 0, 256, 0.9)) }, "Sample goal");
  const goal = new Media({ kinds: ["image"], many: false, label: "The goal", extra: [sampleGoal] });
  const task = select(isArm ? [FEATURES, CANDIDATES] : [FEATURES], FEATURES);
  task.addEventListener("change", () => { goal.zone.hidden = task.value !== CANDIDATES; });
  goal.zone.hidden = true;
  const frames = el("input", { type: "number", min: 1, max: 64, value: isArm ? 4 : 16 });
  const run = el("button", { class: "primary", type: "submit" }, "Run");
  const out = el("div", { class: "stack" });
  const shown = figures(["First output", "Outputs"]);
  const error = el("p", { class: "error", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    error.textContent = "";
    const isScored = task.value === CANDIDATES;
    if (!media.files.length || (isScored && !goal.files.length)) { error.textContent = `Add a clip${isScored ? " and a goal" : ""}, or take the samples.`; return; }
    out.replaceChildren();
    run.disabled = true;
    const chosen = card.parameters.properties.num_frames ? { num_frames: Number(frames.value) } : {};
    const extras = isScored ? { task: "rollout", actions: candidates(), states: [Array(WIDTH).fill(0)], returns: ["energies"], ...chosen } : { task: "encode", ...chosen };
    const form = [...media.files, ...(isScored ? goal.files : [])].map((file) => ["files", file]);
    form.push(["output_modalities", isScored ? "tensor,scalar" : "tensor"], ["model_kwargs", JSON.stringify(extras)]);
    let count = 0;
    const energies = [];
    let best = -1;
    try {
      await session.send({ path: "/generate", form, surface: title }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) {
          shown.set("First output", milliseconds(clock.first()));
          shown.set("Outputs", ++count);
          const { name, dtype, shape, grid } = item.metadata;
          if (name === "energies") energies.push([...numbers(item.bytes, dtype)]);
          else if (name === "best_index") best = numbers(item.bytes, dtype)[0];
          else if (item.modality === "tensor" && !isScored) out.append(...features(numbers(item.bytes, dtype), shape, grid, name));
          if (energies.length) out.replaceChildren(...energyPlots(energies, best));
        }
      });
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      run.disabled = false;
    }
  }

  return el("form", { class: "card stack", onsubmit: submit }, el("h2", {}, "Clip to features"), media.zone, goal.zone,
    el("div", { class: "fields" }, isArm ? field("Task", task) : null, card.parameters.properties.num_frames ? field("Frames", frames) : null, el("div", { class: "row" }, run)), error, out, shown.list);
}

/** Return the features of a clip: one picture per time of the grid. */
function features(rows, shape, grid, name) {
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

function energyPlots(energies, best) {
  const plots = energies.map((values, step) => line(values, `step ${step + 1}, by candidate`, { dots: true, mark: best }));
  return [el("h3", {}, "Distance to the goal"), el("div", { class: "plots" }, plots), best >= 0 ? el("p", {}, `Candidate ${best} ends nearest to the goal.`) : null].filter(Boolean);
}
