// Robot: cameras, state and instruction in; the action chunk out, as one plot per dimension.

import { el, field, figures, milliseconds } from "./dom.js";
import { Media, samplePicture } from "./media.js";
import { checked, numbers, outputs } from "./net.js";
import { line } from "./plot.js";

export const title = "Robot";
export const fits = (card) => card.output_modalities.includes("action");

const CAMERAS = ["base", "left_wrist", "right_wrist"];
const STATE = [0.1, -0.2, 0.3, 0, 0.5, -0.5, 0.25, 0.75];

export function mount(card, session) {
  const samples = el("button", { type: "button", class: "small", onclick: async () => media.add(...await Promise.all(CAMERAS.map((name, i) => samplePicture(name, i)))) }, "Sample cameras");
  const media = new Media({ kinds: ["image"], label: "Cameras, in the model's order", extra: [samples] });
  const words = el("input", { type: "text", required: true, value: card.example || "fold the towel" });
  const state = el("input", { type: "text", required: true, value: (card.example_params?.robot_state || STATE).join(", ") });
  const act = el("button", { class: "primary", type: "submit" }, "Act");
  const plots = el("div", { class: "plots" });
  const shown = figures(["Latency", "Actions", "Dimensions"]);
  const error = el("p", { class: "error", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    error.textContent = "";
    const values = state.value.split(/[\s,]+/).filter(Boolean).map(Number);
    if (values.some(Number.isNaN)) { error.textContent = "The state must be numbers, separated by commas."; return; }
    if (!media.files.length) { error.textContent = "Add at least one camera, or take the samples."; return; }
    act.disabled = true;
    const form = [...media.files.map((file) => ["files", file]), ["text", words.value], ["output_modalities", "action"], ["model_kwargs", JSON.stringify({ robot_state: values })]];
    try {
      await session.send({ path: "/generate", form, surface: title }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) {
          shown.set("Latency", milliseconds(clock.first()));
          if (item.modality === "action") show(item);
        }
      });
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      act.disabled = false;
    }
  }

  function show({ bytes, metadata }) {
    const [horizon, width] = metadata.shape.slice(-2);
    const all = numbers(bytes, metadata.dtype);
    shown.set("Actions", horizon);
    shown.set("Dimensions", width);
    plots.replaceChildren(...Array.from({ length: width }, (_, at) => line(Array.from({ length: horizon }, (_, step) => all[step * width + at]), `dimension ${at}`)));
  }

  return el("form", { class: "card stack", onsubmit: submit }, el("h2", {}, "Observation to actions"), media.zone, field("Instruction", words), field("State, as the robot reports it", state),
    el("div", { class: "row" }, act), error, shown.list, plots);
}
