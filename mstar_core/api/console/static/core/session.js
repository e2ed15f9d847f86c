// One request at a time: sends it, measures it, keeps the last ones, shows what belongs to it afterwards.

import { el, milliseconds } from "./dom.js";
import { call, json, optionsOf, Failure } from "./net.js";
import { Shelf, newId, onForget } from "./shelf.js";
import { account } from "../telemetry/account.js";
import { maySeeDeployment } from "../telemetry/live.js";
import { snippets } from "./snippets.js";

const KEPT = 12;

export class Session {
  /** adapters: models beside `card` that requests may name. */
  constructor(card, after, list, adapters = []) {
    this.card = card;
    this.adapters = adapters;
    this.after = after;
    this.list = list;
    this.past = [];
    this.shelf = new Shelf(card.id, "requests", KEPT);
    onForget(() => { this.past = []; this.after.replaceChildren(); this.drawList(); });
    this.shelf.all().then((kept) => { this.past.push(...kept.slice(0, KEPT - this.past.length)); this.drawList(); });
  }

  /** Send a request; `read` consumes the response. Returns the server's outcome. Throws what `read` throws. */
  async send(request, read) {
    this.cancel();
    const name = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    const abort = new AbortController();
    this.running = abort;
    const began = performance.now();
    const item = { id: newId(), name, request, at: new Date(), status: "running", ttft: null, total: null, outcome: {} };
    const clock = { now: () => performance.now() - began, first: () => (item.ttft ??= performance.now() - began) };
    this.past.unshift(item);
    this.past.length = Math.min(this.past.length, KEPT);
    this.drawList();
    this.open(item);
    try {
      const answer = await call(request.path, optionsOf(request, name, abort.signal));
      item.warnings = answer.headers.get("x-mstar-warnings") || "";
      await read(answer, clock);
      item.status = "finished";
      item.total = clock.now();
      item.outcome = await outcomeOf(name);
      return item.outcome;
    } catch (problem) {
      item.status = abort.signal.aborted ? "cancelled" : "failed";
      item.error = this.message(problem);
      throw problem;
    } finally {
      item.total ??= clock.now();
      if (this.running === abort) this.running = null;
      this.drawList();
      this.open(item);
      const { bars, code, ...kept } = item;
      this.shelf.put(kept);
    }
  }

  cancel() { this.running?.abort(); }

  message(problem) {
    if (problem.name === "AbortError") return "Stopped.";
    return problem instanceof Failure ? problem.message : `The connection failed: ${problem.message}`;
  }

  drawList() {
    if (!this.past.length) { this.list.replaceChildren(el("li", { class: "faint" }, "None yet.")); return; }
    this.list.replaceChildren(...this.past.map((past) => el("li", {}, el("button", { type: "button", onclick: () => this.open(past) },
      el("span", {}, past.request.surface), el("span", {}, past.total == null ? "…" : milliseconds(past.total)),
      el("span", { class: "id" }, past.name), el("span", { class: past.status === "failed" ? "error" : "faint" }, past.status)))));
  }

  open(item) {
    const parts = [el("h2", {}, `${item.request.surface} request`), el("p", { class: "faint" }, factsOf(item))];
    if (item.error && item.status === "failed") parts.push(el("p", { class: "error" }, item.error));
    if (item.warnings) parts.push(el("p", { class: "faint" }, `Warning: ${item.warnings}`));
    if (item.total != null) parts.push(item.bars ??= account(item, maySeeDeployment()));
    item.code ??= snippets(item.request, this.card);
    parts.push(item.code);
    this.after.replaceChildren(el("section", { class: "card stack", "aria-label": "The request" }, parts));
  }
}

const TRIES = 4;
const PAUSE_MS = 60;

/** Return the seed, usage and reason of the end. The registry may learn of the end after the last byte was read. */
async function outcomeOf(name) {
  for (let round = 0; round < TRIES; round++) {
    try {
      const found = await json(`/v1/requests/${encodeURIComponent(name)}`);
      if (found.usage) return found;
    } catch { return {}; }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
  return {};
}

function factsOf({ at, status, outcome }) {
  const { seed, finish_reason: reason, usage = {} } = outcome;
  return [at.toLocaleTimeString(), reason === "length" ? "ended at its length limit" : status, usage.prompt_tokens ? `${usage.prompt_tokens} tokens in` : "",
    usage.completion_tokens ? `${usage.completion_tokens} out` : "", seed == null ? "" : `seed ${seed}`].filter(Boolean).join(" · ");
}
