// The spans of one request, drawn as rows of bars over a common time axis.

import { el, milliseconds } from "./dom.js";
import { json } from "./net.js";

const TRIES_MS = [300, 700, 1500];

/** Return an element that fills itself once the supervisor has the trace. */
export function waterfall(id) {
  const box = el("div", { class: "stack" }, el("h3", {}, "Where the time went"), el("p", { class: "faint" }, "…"));
  load(id).then((trace) => box.replaceChildren(...drawn(trace)), (problem) => { box.lastChild.textContent = `No trace: ${problem.message}`; });
  return box;
}

async function load(id) {
  for (const [index, wait] of TRIES_MS.entries()) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      const trace = await json(`/console/trace/${encodeURIComponent(id)}`);
      if (!["run", "queue", "prepare"].includes(trace.request.state) || index === TRIES_MS.length - 1) return trace;
    } catch (problem) {
      if (problem.code !== "request_not_found" || index === TRIES_MS.length - 1) throw problem;
    }
  }
}

function drawn({ request, spans }) {
  const end = Math.max(1, request.ttft_ms || 0, ...spans.map((span) => span.end_ms));
  const rows = new Map();
  for (const span of spans) {
    const name = span.rank == null ? `${span.process} ${span.node}` : `${span.node}`;
    const row = rows.get(name) || { title: span.rank == null ? span.process : `rank ${span.rank}`, spans: [] };
    row.spans.push(span);
    rows.set(name, row);
  }
  const percent = (value) => `${(100 * Math.max(0, value)) / end}%`;
  const cells = [];
  for (const [name, row] of rows) {
    const track = el("div", { class: "track" });
    for (const span of row.spans) {
      const bar = el("span", { class: `bar-part ${span.kind}`, title: `${span.kind} ${span.walk || span.node}: ${span.start_ms.toFixed(1)} to ${span.end_ms.toFixed(1)} ms` });
      bar.style.left = percent(span.start_ms);
      bar.style.width = percent(span.end_ms - span.start_ms);
      track.append(bar);
    }
    if (request.ttft_ms) {
      const mark = el("span", { class: "ttft" });
      mark.style.left = percent(request.ttft_ms);
      track.append(mark);
    }
    const busy = row.spans.filter((span) => span.kind === "compute").reduce((sum, span) => sum + span.end_ms - span.start_ms, 0);
    cells.push(el("span", { class: "name", title: row.title }, name), track, el("span", { class: "faint" }, busy ? milliseconds(busy) : "waits"));
  }
  const keys = ["compute", "queue", "stall", "transfer"].map((kind) => el("span", {}, el("i", { class: kind }), kind === "stall" ? "waits for a stream" : kind));
  return [el("h3", {}, "Where the time went"),
    el("div", { class: "bars", role: "img", "aria-label": `Waterfall of ${rows.size} rows over ${milliseconds(end)}` }, cells),
    el("div", { class: "row between" }, el("span", { class: "key" }, keys, request.ttft_ms ? el("span", {}, el("i", { class: "ttft" }), `first output ${milliseconds(request.ttft_ms)}`) : null),
      el("span", { class: "faint" }, `0 to ${milliseconds(end)}`))];
}
