// One request at a time: sends it, measures it, keeps the last ones, shows what belongs to it afterwards.

import { el, milliseconds } from "./dom.js";
import { call, optionsOf, Failure } from "./net.js";
import { maySeeDeployment } from "./graph.js";
import { snippets } from "./snippets.js";
import { waterfall } from "./waterfall.js";

const KEPT = 12;

export class Session {
  constructor(card, after, list) {
    this.card = card;
    this.after = after;
    this.list = list;
    this.past = [];
  }

  /** Send a request; `read` consumes the response. Throws what `read` throws. */
  async send(request, read) {
    this.cancel();
    const id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    const abort = new AbortController();
    this.running = abort;
    const began = performance.now();
    const item = { id, request, at: new Date(), status: "running", ttft: null, total: null, facts: {} };
    const clock = { now: () => performance.now() - began, first: () => (item.ttft ??= performance.now() - began) };
    this.past.unshift(item);
    this.past.length = Math.min(this.past.length, KEPT);
    this.show(item);
    try {
      const answer = await call(request.path, optionsOf(request, id, abort.signal));
      item.facts = (await read(answer, clock)) || {};
      item.status = "finished";
    } catch (problem) {
      item.status = abort.signal.aborted ? "cancelled" : "failed";
      throw problem;
    } finally {
      item.total = clock.now();
      if (this.running === abort) this.running = null;
      this.show(item);
    }
  }

  cancel() { this.running?.abort(); }

  message(problem) {
    if (problem.name === "AbortError") return "Stopped.";
    return problem instanceof Failure ? problem.message : `The connection failed: ${problem.message}`;
  }

  show(item) {
    this.list.replaceChildren(...this.past.map((past) => el("li", {}, el("button", { type: "button", onclick: () => this.open(past) },
      el("span", {}, past.request.surface), el("span", {}, past.total == null ? "…" : milliseconds(past.total)),
      el("span", { class: "id" }, past.id), el("span", { class: past.status === "failed" ? "error" : "faint" }, past.status)))));
    this.open(item);
  }

  open(item) {
    const parts = [el("h2", {}, `${item.request.surface} request`),
      el("p", { class: "faint" }, `${item.at.toLocaleTimeString()} · ${item.status}`, item.ttft == null ? "" : ` · first output ${milliseconds(item.ttft)}`,
        item.total == null ? "" : ` · total ${milliseconds(item.total)}`)];
    if (item.total != null && maySeeDeployment()) parts.push(item.bars ??= waterfall(item.id));
    item.code ??= snippets(item.request, this.card);
    parts.push(item.code);
    this.after.replaceChildren(el("section", { class: "card stack", "aria-label": "The request" }, parts));
  }
}
