// Form of one task of a world model: sends its files, counts the outputs and shows them as they arrive.

import { button, el, figures, milliseconds } from "../../core/dom.js";
import { checked, outputs } from "../../core/net.js";

/**
 * Return the form. inputs: elements above the controls; fields: beside the buttons.
 *
 * start: returns {form, take} of a run: the entries of its request, and a function that shows an output in an element. It throws
 * Failure if an input is missing.
 */
export function taskForm(session, title, { inputs, fields = [], start }) {
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
    [run.disabled, stop.disabled] = [true, false];
    let count = 0;
    try {
      const { form, take } = await start();
      await session.send({ path: "/generate", form, surface: title }, async (response, clock) => {
        for await (const item of outputs(await checked(response))) {
          shown.set("First output", milliseconds(clock.first()));
          shown.set("Outputs", ++count);
          take(item, out);
        }
      });
    } catch (problem) {
      error.textContent = session.message(problem);
    } finally {
      [run.disabled, stop.disabled] = [false, true];
    }
  }

  return el("form", { class: "stack", onsubmit: submit }, inputs, el("div", { class: "fields" }, fields, el("div", { class: "row" }, run, stop)), error, out, shown.list);
}
