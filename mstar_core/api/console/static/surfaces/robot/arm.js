// The simulated arm of pi05:mini in a closed loop: three cameras and the joints in, movements of the joints out.

import { button, counted, el, field, milliseconds, select } from "../../core/dom.js";
import { checked, numbers, outputs } from "../../core/net.js";
import { Params } from "../../core/params.js";
import * as world from "../../drawing/arm.js";
import { pngOf } from "../../drawing/pixels.js";
import { plot } from "../../drawing/plot.js";
import { Loop } from "../loop.js";
import { Pace } from "./pace.js";
import { ArmScene } from "./scene.js";

const PERIOD_MS = 500;
const MOST_TICKS = 20;

export function mount(card, session) {
  const scene = new ArmScene();
  const target = select(world.NAMES, "red");
  const words = el("input", { type: "text", required: true });
  const instruct = () => { words.value = `reach the ${target.value} target`; scene.name(world.NAMES.indexOf(target.value)); };
  target.addEventListener("change", instruct);
  const period = el("input", { type: "number", min: 50, max: 10000, step: 10, value: PERIOD_MS, required: true });
  const params = new Params(card, { first: ["num_steps", "seed"] });
  params.fill({ seed: 1 });
  const once = button("One chunk", () => drive(1));
  const measure = () => loop.shown.set("Distance", scene.distance.toFixed(3));
  const loop = new Loop(session, { label: "Run", names: ["Distance", "Latency, median", "Ticks", "Missed deadlines"], draw: () => scene.draw(), measure, extra: [once] });
  const { shown, plots } = loop;

  /** Request one chunk for what the cameras see now: {rows: movements of two joints, at: when they were read}. timing: period and skipped ticks. */
  async function requested(timing) {
    const cameras = await Promise.all(world.render(scene.state).map((pixels, i) => pngOf(pixels, world.SIDE, world.CAMERAS[i])));
    const form = [...cameras.map((file) => ["files", file]), ["text", words.value], ["output_modalities", "action"],
      ["model_kwargs", JSON.stringify({ robot_state: scene.joints, ...params.values(), ...timing })]];
    const found = { rows: [], at: 0 };
    await session.send({ path: "/generate", form, surface: "Robot" }, async (response, clock) => {
      for await (const { modality, bytes, metadata } of outputs(await checked(response))) {
        if (modality !== "action") continue;
        clock.first();
        const width = metadata.shape.at(-1), all = numbers(bytes, metadata.dtype);
        found.rows = Array.from({ length: all.length / width }, (_, step) => [...all.slice(step * width, step * width + 2)]);
      }
      found.at = performance.now();
    });
    return found;
  }

  const drive = (most) => loop.run(async () => {
    const pace = new Pace(Number(period.value) || PERIOD_MS);
    const joints = [[scene.joints[0]], [scene.joints[1]]], distances = [scene.distance];
    const began = performance.now();
    while (pace.made < most && !loop.isStopped && !scene.isReached) {
      const { rows, at } = await requested(most > 1 ? { period_ms: pace.period, skipped_ticks: pace.justSkipped } : {});
      const rest = pace.answered(at - began);
      shown.set("Latency, median", milliseconds(pace.median));
      shown.set("Ticks", pace.made);
      shown.set("Missed deadlines", pace.missed ? `${pace.missed} (${pace.late} late, ${pace.skipped} skipped)` : "0");
      await scene.play(rows, rest, () => { scene.joints.forEach((value, i) => joints[i].push(value)); distances.push(scene.distance); measure(); });
      plots.replaceChildren(plot(joints, "joint angles in rad: shoulder, elbow"), plot([distances], "distance of tip and target"));
      loop.status.textContent = `Tick ${pace.made}`;
    }
    if (scene.isReached) return `The tip is at the ${world.NAMES[scene.named]} target after ${counted(pace.made, "tick")}.`;
    return loop.isStopped ? "Stopped." : `The tip is ${scene.distance.toFixed(3)} from the target.`;
  });

  instruct();
  loop.clear();
  const act = (event) => { event.preventDefault(); if (scene.isReached) scene.draw(); drive(MOST_TICKS); };
  return el("form", { class: "card stack", onsubmit: act }, el("h2", {}, "Closed loop"),
    el("p", { class: "faint" }, "The model sees three cameras and the joint angles. The page moves the arm as the model answers, then it looks again. A tick whose answer takes longer than the period misses its deadline."),
    scene.box, el("div", { class: "fields" }, field("Target", target), field("Instruction", words), field("Period, ms", period), params.fields, loop.row),
    params.more, loop.error, loop.status, shown.list, plots);
}
