// Energies of candidate actions: the distance of their predicted frames to a goal.

import { button, el, figures, milliseconds } from "../core/dom.js";
import { checked, numbers, outputs } from "../core/net.js";
import * as block from "../drawing/block.js";
import { pngOf } from "../drawing/pixels.js";
import { plot } from "../drawing/plot.js";
import { Media } from "../media/files.js";
import { samplePicture } from "../media/samples.js";
import { Clip } from "./clips.js";

export const title = "Energies of candidates";
export const fits = (card) => Boolean(card.parameters.properties.actions);

const [COUNT, HORIZON, WIDTH, REACH] = [8, 2, 7, 0.05];
const GOAL = [0.08, -0.04];

/** Return candidates of actions: [count, horizon, 7], moves of the arm in as many directions. */
function candidates() {
  return Array.from({ length: COUNT }, (_, k) => Array.from({ length: HORIZON }, () => Array.from({ length: WIDTH }, (_, axis) =>
    Number((axis < 2 ? REACH * (axis ? Math.sin : Math.cos)((2 * Math.PI * k) / COUNT) : 0).toFixed(4)))));
}

export function mount(card, session) {
  const clip = new Clip(card, { most: 1, label: "The frame of now" });
  const isBlock = card.world === "block";
  const sampleGoal = async () => (isBlock ? pngOf(block.render(GOAL), block.SIDE, "goal") : samplePicture("goal", { size: 256, phase: 0.9 }));
  const goal = new Media({ kinds: ["image"], many: false, label: "The goal", extra: [button("Sample goal", async () => goal.add(await sampleGoal()), { class: "small" })] });
  const run = el("button", { class: "primary", type: "submit" }, "Run");
  const out = el("div", { class: "stack" });
  const shown = figures(["First output", "Outputs"]);
  const error = el("p", { class: "error", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    error.textContent = "";
    shown.clear();
    out.replaceChildren();
    if (!goal.files.length) { error.textContent = "Add a goal, or take the sample."; return; }
    run.disabled = true;
    const energies = [];
    let best = -1, count = 0;
    try {
      const files = await clip.files();
      const extras = { task: "rollout", actions: candidates(), states: [Array(WIDTH).fill(0)], returns: ["energies"], ...clip.given() };
      const form = [...files, goal.files[0]].map((file) => ["files", file]);
      form.push(["output_modalities", "tensor,scalar"], ["model_kwargs", JSON.stringify(extras)]);
      await session.send({ path: "/generate", form, surface: title }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) {
          shown.set("First output", milliseconds(clock.first()));
          shown.set("Outputs", ++count);
          const { name, dtype } = item.metadata;
          if (name === "energies") energies.push([...numbers(item.bytes, dtype)]);
          else if (name === "best_index") best = numbers(item.bytes, dtype)[0];
          if (energies.length) out.replaceChildren(...energyPlots(energies, best));
        }
      });
    } catch (problem) {
      error.textContent = problem.constructor === Error ? problem.message : session.message(problem);
    } finally {
      run.disabled = false;
    }
  }

  return el("form", { class: "stack", onsubmit: submit }, el("p", { class: "faint" }, `${COUNT} candidates of ${HORIZON} moves each, in as many directions.`), clip.media.zone, goal.zone,
    el("div", { class: "row" }, run), error, out, shown.list);
}

function energyPlots(energies, best) {
  const plots = energies.map((values, step) => plot([values], `step ${step + 1}, by candidate`, { joined: false, mark: best }));
  return [el("h3", {}, "Distance to the goal"), el("div", { class: "plots" }, plots), best >= 0 ? el("p", {}, `Candidate ${best} ends nearest to the goal.`) : null].filter(Boolean);
}
