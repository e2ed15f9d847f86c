// Controls of a closed loop in a simulated world: run, stop, other places, and what is shown of a run.

import { button, el, figures } from "../core/dom.js";

export class Loop {
  /** label: of the button that submits the form. names: of the figures. draw: puts the world at other places. measure: shows its distance. */
  constructor(session, { label, names, draw, measure, extra = [] }) {
    this.session = session;
    this.measure = measure;
    this.isStopped = false;
    this.stop = button("Stop", () => { this.isStopped = true; session.cancel(); }, { disabled: true });
    const run = el("button", { class: "primary", type: "submit" }, label);
    const other = button("Other places", () => { draw(); this.clear(); });
    this.starts = [run, ...extra, other];
    this.row = el("div", { class: "row" }, run, extra, this.stop, other);
    this.shown = figures(names);
    this.status = el("p", { role: "status" });
    this.error = el("p", { class: "error", role: "alert" });
    this.plots = el("div", { class: "plots" });
  }

  clear() {
    this.error.textContent = this.status.textContent = "";
    this.plots.replaceChildren();
    this.shown.clear();
    this.measure();
  }

  /** Run the loop: `act` acts until it is done or `isStopped`, and returns the sentence that ends it. */
  async run(act) {
    this.clear();
    this.isStopped = false;
    this.setRunning(true);
    try {
      this.status.textContent = await act();
    } catch (problem) {
      this.status.textContent = this.isStopped ? "Stopped." : "";
      this.error.textContent = this.isStopped ? "" : this.session.message(problem);
    } finally {
      this.setRunning(false);
    }
  }

  setRunning(isRunning) {
    for (const each of this.starts) each.disabled = isRunning;
    this.stop.disabled = !isRunning;
  }
}
