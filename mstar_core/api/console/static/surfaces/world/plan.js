// Plans to a goal picture. The world of vjepa2_ac:mini is simulated: the block moves as planned. For other models the plan is shown.

import { button, counted, el, field, figures, milliseconds } from "../../core/dom.js";
import { checked, numbers, outputs } from "../../core/net.js";
import { Params } from "../../core/params.js";
import { sampleButton } from "../../core/samples.js";
import { plot } from "../../drawing/plot.js";
import { Media } from "../../media/files.js";
import { Loop } from "../loop.js";
import { Table } from "./table.js";

export const title = "Plan";
export const fits = (card) => Boolean(card.parameters.properties.cem_steps);

const FIRST = ["samples", "topk", "cem_steps", "horizon", "maxnorm", "seed"];
const WIDTH = 7;

/** Search as it is judged for the miniature: few candidates, and only the plane of the table is planned. */
const MINI = { samples: 64, topk: 8, cem_steps: 5, horizon: 2, seed: 1 };

/** Request one plan. Returns {actions: rows of 7, energy, energies: the best of each planning step, latency in ms}. */
async function requested(session, { now, goal, state, extras }) {
  const form = [["files", now], ["files", goal], ["output_modalities", "tensor"], ["model_kwargs", JSON.stringify({ task: "plan", states: [state], returns: ["energies"], ...extras })]];
  const found = { actions: [], energy: NaN, energies: [], latency: 0 };
  await session.send({ path: "/generate", form, surface: title }, async (response, clock) => {
    for await (const { modality, bytes, metadata } of outputs(await checked(response))) {
      if (modality !== "tensor") continue;
      clock.first();
      const values = [...numbers(bytes, metadata.dtype)];
      if (metadata.name === "actions") found.actions = Array.from({ length: values.length / WIDTH }, (_, row) => values.slice(row * WIDTH, (row + 1) * WIDTH));
      if (metadata.name === "best_energy") { found.energy = values[0]; found.energies.push(values[0]); }
    }
    found.latency = clock.now();
  });
  return found;
}

export function mount(card, session) {
  return card.world === "block" ? simulated(card, session) : shownPlan(card, session);
}

const MOST_PLANS = 5;

/** The table with the block: plan, move, plan again, until the block is at the goal. */
function simulated(card, session) {
  const table = new Table();
  const params = new Params(card, { first: ["samples", "cem_steps", "horizon", "seed"], skip: ["maxnorm"] });
  params.fill(MINI);
  const measure = () => loop.shown.set("Distance to the goal", centimetres(table.distance));
  const loop = new Loop(session, { label: "Plan and move", names: ["Distance to the goal", "Plans", "Energy", "Time of a plan"], draw: () => table.draw(), measure });
  const { shown, plots } = loop;

  const drive = () => loop.run(async () => {
    const energies = [], distances = [table.distance], searches = [];
    for (let count = 1; count <= MOST_PLANS && !loop.isStopped && !table.isReached; count++) {
      const extras = { maxnorm: table.fastest, axis: { z: 0, gripper: 0 }, ...params.values() };
      loop.status.textContent = `Plan ${count}…`;
      const plan = await requested(session, { ...await table.pictures(), state: table.state, extras });
      energies.push(plan.energy);
      searches.push(plan.energies);
      for (const action of plan.actions) {
        await table.move(action);
        distances.push(table.distance);
        measure();
      }
      shown.set("Plans", count);
      shown.set("Energy", plan.energy.toFixed(4));
      shown.set("Time of a plan", milliseconds(plan.latency));
      plots.replaceChildren(plot([distances.map((each) => 100 * each)], "distance in cm, by move"), ...(energies.length > 1 ? [plot([energies], "energy, by plan")] : []),
        plot(searches, "best energy, by planning step"));
    }
    if (table.isReached) return `The block is at the goal after ${counted(distances.length - 1, "move")}.`;
    return loop.isStopped ? "Stopped." : `The block is ${centimetres(table.distance)} from the goal.`;
  });

  loop.clear();
  table.onchange = () => loop.clear();
  const submit = (event) => { event.preventDefault(); table.restart(); drive(); };
  return el("form", { class: "stack", onsubmit: submit }, el("p", { class: "faint" }, "The model sees the picture of now and the picture of the goal. It plans moves of the arm, the page makes them, and it plans again."),
    table.box, el("div", { class: "fields" }, params.fields, loop.row), params.more, loop.error, loop.status, shown.list, plots);
}

const centimetres = (metres) => `${(100 * metres).toFixed(1)} cm`;

/** Pictures and a state in, the plan out as a table of actions. */
function shownPlan(card, session) {
  const [now, goal] = ["Now", "The goal"].map((label) => new Media({ kinds: ["image"], many: false, label }));
  const state = el("input", { type: "text", required: true, value: Array(WIDTH).fill(0).join(", ") });
  const params = new Params(card, { first: FIRST });
  const sample = sampleButton("Sample", ({ params: given, files }) => given.task === "plan" && files.length === 2, ({ params: given, files }) => {
    now.add(files[0]);
    goal.add(files[1]);
    state.value = given.states[0].join(", ");
    params.fill(given);
  });
  const run = el("button", { class: "primary", type: "submit" }, "Plan");
  const stop = button("Stop", () => session.cancel(), { disabled: true });
  const shown = figures(["Energy", "Time of a plan"]);
  const out = el("div", { class: "stack" });
  const error = el("p", { class: "error", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    error.textContent = "";
    shown.clear();
    out.replaceChildren();
    const values = state.value.split(/[\s,]+/).filter(Boolean).map(Number);
    if (values.length !== WIDTH || values.some(Number.isNaN)) { error.textContent = `The state must be ${WIDTH} numbers: position, Euler angles, gripper.`; return; }
    if (!now.files.length || !goal.files.length) { error.textContent = "Add both pictures, or take the sample."; return; }
    [run.disabled, stop.disabled] = [true, false];
    try {
      const plan = await requested(session, { now: now.files[0], goal: goal.files[0], state: values, extras: params.values() });
      shown.set("Energy", plan.energy.toFixed(4));
      shown.set("Time of a plan", milliseconds(plan.latency));
      out.replaceChildren(actionTable(plan.actions), el("div", { class: "plots" }, plot([plan.energies], "best energy, by planning step")));
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      [run.disabled, stop.disabled] = [false, true];
    }
  }

  return el("form", { class: "stack", onsubmit: submit }, now.zone, goal.zone, field("State: position, Euler angles, gripper", state),
    el("div", { class: "fields" }, params.fields, el("div", { class: "row" }, run, stop, sample)), params.more, error, out, shown.list);
}

const AXES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"];

function actionTable(actions) {
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["step", ...AXES].map((name) => el("th", { class: "num" }, name)))),
    el("tbody", {}, actions.map((action, step) => el("tr", {}, [step + 1, ...action.map((value) => value.toFixed(4))].map((value) => el("td", { class: "num" }, String(value))))))));
}
