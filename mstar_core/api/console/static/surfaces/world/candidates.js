// Energies of candidate actions: the distance of their predicted frames to a goal.

import { button, el } from "../../core/dom.js";
import { Failure, numbers } from "../../core/net.js";
import * as block from "../../drawing/block.js";
import { pngOf } from "../../drawing/pixels.js";
import { plot } from "../../drawing/plot.js";
import { Media } from "../../media/files.js";
import { samplePicture } from "../../media/samples.js";
import { Clip } from "./clips.js";
import { taskForm } from "./task.js";

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
  const about = el("p", { class: "faint" }, `${COUNT} candidates of ${HORIZON} moves each, in as many directions.`);

  async function start() {
    if (!goal.files.length) throw new Failure("Add a goal, or take the sample.");
    const files = await clip.files();
    const extras = { task: "rollout", actions: candidates(), states: [Array(WIDTH).fill(0)], returns: ["energies"], ...clip.given() };
    const form = [...[...files, goal.files[0]].map((file) => ["files", file]), ["output_modalities", "tensor,scalar"], ["model_kwargs", JSON.stringify(extras)]];
    const energies = [];
    let best = -1;
    const take = ({ bytes, metadata: { name, dtype } }, out) => {
      if (name === "energies") energies.push([...numbers(bytes, dtype)]);
      else if (name === "best_index") best = numbers(bytes, dtype)[0];
      if (energies.length) out.replaceChildren(...energyPlots(energies, best));
    };
    return { form, take };
  }

  return taskForm(session, title, { inputs: [about, clip.media.zone, goal.zone], start });
}

function energyPlots(energies, best) {
  const plots = energies.map((values, step) => plot([values], `step ${step + 1}, by candidate`, { joined: false, mark: best }));
  return [el("h3", {}, "Distance to the goal"), el("div", { class: "plots" }, plots), best >= 0 ? el("p", {}, `Candidate ${best} ends nearest to the goal.`) : null].filter(Boolean);
}
