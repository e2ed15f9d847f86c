// World model: features of a clip, energies of candidate actions, and plans. One task is shown at a time.

import { el, field, select } from "../core/dom.js";
import * as candidates from "./world/candidates.js";
import * as features from "./world/features.js";
import * as plan from "./world/plan.js";

export const title = "World model";
export const fits = (card) => card.output_modalities.includes("tensor") && card.input_modalities.includes("video") && !card.endpoints.includes("/v1/chat/completions");

export function mount(card, session) {
  // A miniature is shown what it is good at; a full model begins with the cheapest task.
  const tasks = [features, candidates, plan].filter((task) => task.fits(card));
  if (card.world) tasks.reverse();
  const forms = tasks.map((task) => task.mount(card, session));
  const chosen = select(tasks.map((task) => task.title), tasks[0].title);
  const show = () => forms.forEach((form, index) => { form.hidden = tasks[index].title !== chosen.value; });
  chosen.addEventListener("change", () => { session.cancel(); show(); });
  show();
  return el("div", { class: "card stack" }, el("h2", {}, "World model"), tasks.length > 1 ? field("Task", chosen) : null, forms);
}
