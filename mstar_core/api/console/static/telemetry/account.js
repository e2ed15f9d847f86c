// The account of one request: what client and server measured, and where the time went.

import { el, milliseconds } from "../core/dom.js";
import { json } from "../core/net.js";
import { gaps, rowsOf } from "./rows.js";
import { knownGraph } from "./live.js";

const TRIES_MS = [300, 700, 1500];
const KINDS = { compute: "compute", queue: "queue", wait: "waits for input", transfer: "transfer", stall: "stall: silence that was heard" };
const DENSE = 0.95;
const STRIPE_PX = 6;

/** Return an element that fills itself once the supervisor has the trace. Without access it shows the api's figures. */
export function account(item, isAllowed) {
  const box = el("div", { class: "stack" }, comparison(item, item.outcome.usage || {}));
  if (!isAllowed) return box;
  const waiting = el("p", { class: "faint" }, "…");
  box.append(el("h3", {}, "Where the time went"), waiting);
  load(item.name).then(
    (trace) => box.replaceChildren(comparison(item, serverTimes(trace.request)), ...drawn(trace)),
    (problem) => { waiting.textContent = `No trace: ${problem.message}`; },
  );
  return box;
}

async function load(name) {
  for (const [index, wait] of TRIES_MS.entries()) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      const trace = await json(`/console/trace/${encodeURIComponent(name)}`);
      if (!["run", "queue", "prepare", "resume"].includes(trace.request.state) || index === TRIES_MS.length - 1) return trace;
    } catch (problem) {
      if (problem.code !== "request_not_found" || index === TRIES_MS.length - 1) throw problem;
    }
  }
}

const serverTimes = ({ ttft_ms, started, ended }) => ({ ttft_ms, total_ms: ended == null ? null : 1000 * (ended - started) });

/** Return the table of the times that this page measured, those of the server, and the difference. */
function comparison(item, server) {
  const cell = (value) => el("td", { class: "num" }, value == null ? "–" : milliseconds(value));
  const rows = gaps(item, server).map(({ name, client, server: there, gap }) => el("tr", {}, el("th", { scope: "row" }, name), cell(client), cell(there), cell(gap)));
  const head = ["", "client", "server", "between"].map((name) => el("th", { scope: "col", class: name ? "num" : null }, name));
  return el("div", { class: "scroll" }, el("table", { class: "times" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
    el("p", { class: "faint" }, "Between: the network and the browser, and the upload."));
}

/** Return `1.1 s = LLM 337 ms + queue 64 ms`: the parts of the request's time. */
function partsText(parts) {
  const shown = parts.filter((part) => Math.abs(part.ms) >= 0.5);
  const words = shown.map((part, index) => `${part.ms < 0 ? "− " : index ? "+ " : ""}${part.name} ${milliseconds(Math.abs(part.ms))}`);
  return shown.length ? `${milliseconds(parts.reduce((sum, part) => sum + part.ms, 0))} = ${words.join(" ")}` : "";
}

function drawn({ request, spans, sums, parts }) {
  const end = Math.max(1, request.ttft_ms || 0, ...spans.map((span) => span.end_ms));
  const rows = rowsOf(spans, sums || [], knownGraph());
  const percent = (value) => `${(100 * Math.max(0, value)) / end}%`;
  const cells = rows.flatMap((row) => {
    const track = el("div", { class: "track" }, row.spans.map((span) => bar(span, percent)));
    if (request.ttft_ms) {
      const mark = el("span", { class: "ttft" });
      mark.style.left = percent(request.ttft_ms);
      track.append(mark);
    }
    return [el("span", { class: "name", title: row.place }, row.name), track, el("span", { class: "faint" }, row.computeMs ? milliseconds(row.computeMs) : row.waits)];
  });
  const seen = new Set(spans.map((span) => span.kind));
  const keys = Object.entries(KINDS).filter(([kind]) => seen.has(kind)).map(([kind, words]) => el("span", {}, el("i", { class: kind }), words));
  return [el("h3", {}, "Where the time went"),
    el("div", { class: "bars", role: "img", "aria-label": `Waterfall of ${rows.length} rows over ${milliseconds(end)}; compute: ${rows.map((row) => `${row.name} ${milliseconds(row.computeMs)}`).join(", ")}` }, cells),
    el("div", { class: "row between" }, el("span", { class: "key" }, keys, request.ttft_ms ? el("span", {}, el("i", { class: "ttft" }), `first output, server: ${milliseconds(request.ttft_ms)}`) : null),
      el("span", { class: "faint" }, `0 to ${milliseconds(end)}; at the right: compute`)),
    el("p", { class: "faint" }, partsText(parts || []))];
}

function bar(span, percent) {
  const made = el("span", { class: `bar-part ${span.kind}`, title: `${KINDS[span.kind] || span.kind} ${span.walk || span.node}: ${milliseconds(span.busy_ms)} from ${span.start_ms.toFixed(1)} to ${span.end_ms.toFixed(1)} ms` });
  made.style.left = percent(span.start_ms);
  const length = span.end_ms - span.start_ms;
  made.style.width = percent(length);
  if (length > 0 && span.busy_ms < DENSE * length) { // many steps with time between them: stripes that cover as much as the steps took
    const ink = Math.max(0.5, (span.busy_ms / length) * STRIPE_PX);
    made.style.maskImage = `repeating-linear-gradient(90deg, #000 0 ${ink}px, transparent ${ink}px ${STRIPE_PX}px)`;
  }
  return made;
}
