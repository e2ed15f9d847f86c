// One observation of a robot to one chunk of actions, as one plot per dimension.

import { el, field, figures, milliseconds } from "../../core/dom.js";
import { checked, numbers, outputs } from "../../core/net.js";
import { Params } from "../../core/params.js";
import { sampleButton } from "../../core/samples.js";
import { plot } from "../../drawing/plot.js";
import { Media } from "../../media/files.js";

const isSample = ({ outputs, params }) => outputs.includes("action") && params.robot_state;

export function mount(card, session) {
  const media = new Media({ kinds: ["image"], label: "Cameras, in the model's order", extra: [sampleButton("Sample observation", isSample, use)] });
  const words = el("input", { type: "text", required: true, value: card.example || "fold the towel" });
  const state = el("input", { type: "text", value: (card.example_params?.robot_state || []).join(", ") });
  const params = new Params(card, { first: ["num_steps", "seed"] });
  const act = el("button", { class: "primary", type: "submit" }, "Act");
  const plots = el("div", { class: "plots" });
  const shown = figures(["Latency", "Actions", "Dimensions"]);
  const error = el("p", { class: "error", role: "alert" });

  /** Take over a sample of the model. */
  function use(sample) {
    media.clear();
    media.add(...sample.files);
    words.value = sample.text;
    const { robot_state: joints, ...rest } = sample.params;
    state.value = joints.join(", ");
    params.fill(rest);
  }

  async function submit(event) {
    event.preventDefault();
    error.textContent = "";
    shown.clear();
    plots.replaceChildren();
    const values = state.value.split(/[\s,]+/).filter(Boolean).map(Number);
    if (values.some(Number.isNaN)) { error.textContent = "The state must be numbers, separated by commas."; return; }
    if (!media.files.length) { error.textContent = "Add at least one camera, or take the sample."; return; }
    act.disabled = true;
    const form = [...media.files.map((file) => ["files", file]), ["text", words.value], ["output_modalities", "action"], ["model_kwargs", JSON.stringify({ ...(values.length ? { robot_state: values } : {}), ...params.values() })]];
    try {
      await session.send({ path: "/generate", form, surface: "Robot" }, async (response, clock) => {
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
    plots.replaceChildren(...Array.from({ length: width }, (_, at) => plot([Array.from({ length: horizon }, (_, step) => all[step * width + at])], `dimension ${at}`)));
  }

  return el("form", { class: "card stack", onsubmit: submit }, el("h2", {}, "Observation to actions"), media.zone, field("Instruction", words), field("State, as the robot reports it", state),
    el("div", { class: "fields" }, params.fields, el("div", { class: "row" }, act)), params.more, error, shown.list, plots);
}
