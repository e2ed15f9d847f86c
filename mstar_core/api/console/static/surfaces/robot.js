// Robot: cameras, state and instruction in, actions out. The arm of pi05:mini is simulated, so that its actions move it.

import * as arm from "./robot/arm.js";
import * as observation from "./robot/observation.js";

export const title = "Robot";
export const fits = (card) => card.output_modalities.includes("action");

export function mount(card, session) {
  return card.world === "arm" ? arm.mount(card, session) : observation.mount(card, session);
}
