// Live picture of the graph: nodes in their ranks, arrows with rates. Read-only.

import { counted, el, svg } from "../core/dom.js";
import { endsOf, layout, NODE, placed, WIDTH } from "./layout.js";
import { watch } from "./live.js";

const NAME_CHARS = 20;
const TIP = 6;
const SIDE = 7;
const ROUND = 16;

export function showGraph(box, note) {
  const say = (words) => { note.textContent = ""; box.replaceChildren(el("p", { class: "faint" }, words)); };
  return watch((state) => draw(box, note, state), () => say("Shown on the server's own host, or with an API key."), () => say("Not available now."));
}

/** Return a rate in words, empty without one. */
export function rate(value, unit) {
  if (!value) return "";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return `${(value / size).toFixed(1)} ${letter}${unit}/s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ${unit}/s`;
}

function draw(box, note, state) {
  const head = state.deployment || {};
  note.textContent = [`${head.running || 0} running`, head.waiting ? `${head.waiting} waiting` : "", head.tokens_s ? rate(head.tokens_s, "tokens") : ""].filter(Boolean).join(" · ");
  const graph = state.graph;
  if (!graph?.nodes?.length) { box.replaceChildren(el("p", { class: "faint" }, "The graph is not known yet.")); return; }
  box.replaceChildren(picture(graph, state), table(graph, state));
}

function picture(graph, state) {
  const { frames, boxes, wires, height } = layout(graph, state);
  const words = `Graph of ${counted(boxes.length, "placed node")}: ${frames.map((frame) => `${frame.title}: ${boxes.filter((box) => box.ranks.join() === frame.ranks.join()).map((box) => box.name).join(", ") || "no node"}`).join("; ")}`;
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: "100%", role: "img", "aria-label": words },
    frames.flatMap((frame) => frameOf(frame, state)), wires.flatMap((wire) => wireOf(wire, boxes)), boxes.map((box) => boxOf(box, state)));
}

function frameOf({ y, height, title, live, ranks, isDown }, state) {
  const device = live.map((rank) => state.gpus?.[rank.gpu]?.name || rank.device).find(Boolean) || "";
  const busy = Math.max(0, ...live.map((rank) => rank.busy || 0));
  const down = live.find((rank) => rank.state && rank.state !== "ready");
  const words = [title, ranks.length > 1 ? `tensor parallel ${ranks.length}` : "", device, isDown ? down.state : busy ? `${Math.round(100 * busy)} % busy` : ""].filter(Boolean).join(" · ");
  return [svg("rect", { class: `rank${isDown ? " down" : ""}`, x: 1, y: y + 1, width: WIDTH - 2, height: height - 2, rx: 10 }), svg("text", { class: "faint", x: 12, y: y + 17 }, words)];
}

function boxOf({ x, y, name, ranks, isDown }, state) {
  const live = isDown ? [] : ranks.map((rank) => state.nodes?.[`${name}@${rank}`]).filter(Boolean);
  const steps = Math.max(0, ...live.map((node) => node.steps_s || 0));
  const busy = Math.max(0, ...live.map((node) => node.busy || 0));
  const words = name.length > NAME_CHARS ? `${name.slice(0, NAME_CHARS - 1)}…` : name;
  const load = isDown ? "down" : steps ? [rate(steps, "steps"), busy ? `${Math.round(100 * busy)} %` : ""].filter(Boolean).join(" · ") : "idle";
  return svg("g", { class: `box${steps ? " busy" : ""}${isDown ? " down" : ""}` }, svg("title", {}, `${name}, rank ${ranks.join("+")}`), svg("rect", { x, y, width: NODE.width, height: NODE.height, rx: 8 }),
    svg("text", { x: x + 9, y: y + 19 }, words), svg("text", { class: "faint", x: x + 9, y: y + 36 }, load));
}

/** Return whether a box lies in the way of a wire that goes straight down. */
function isBlocked({ from, to }, boxes) {
  const [x1, x2] = [from.x, to.x].sort((a, b) => a - b);
  return boxes.some((box) => box !== from && box !== to && box.y > from.y && box.y < to.y && box.x < x2 + NODE.width && box.x + NODE.width > x1);
}

/** Return a curve with an arrow head: downwards between rows, sideways within one, otherwise around the side. */
function wireOf(wire, boxes) {
  const { from, to, isStream, itemsPerSecond } = wire;
  const name = `wire${isStream ? " stream" : ""}${itemsPerSecond ? " moving" : ""}`;
  const middle = (box) => box.x + NODE.width / 2;
  let path, tip;
  if (to.y > from.y && !isBlocked(wire, boxes)) {
    const [x1, y1, x2, y2] = [middle(from), from.y + NODE.height, middle(to), to.y];
    const bend = Math.min(60, (y2 - y1) / 2);
    path = `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2 - TIP}`;
    tip = `M${x2} ${y2}l${-TIP / 1.5} ${-TIP}h${TIP / 0.75}z`;
  } else if (to.y === from.y) {
    const isRight = to.x > from.x;
    const [x1, x2, y] = [isRight ? from.x + NODE.width : from.x, isRight ? to.x : to.x + NODE.width, from.y + NODE.height / 2];
    const sign = isRight ? 1 : -1;
    path = `M${x1} ${y}L${x2 - sign * TIP} ${y}`;
    tip = `M${x2} ${y}l${-sign * TIP} ${-TIP / 1.5}v${TIP / 0.75}z`;
  } else {
    const isLeft = middle(to) + middle(from) < WIDTH || (middle(to) + middle(from) === WIDTH && to.y < from.y);
    const [x1, x2] = isLeft ? [from.x, to.x] : [from.x + NODE.width, to.x + NODE.width];
    const [y1, y2, out, sign] = [from.y + NODE.height / 2, to.y + NODE.height / 2, isLeft ? SIDE : WIDTH - SIDE, isLeft ? 1 : -1];
    const turn = to.y < from.y ? -ROUND : ROUND;
    path = `M${x1} ${y1}C${out} ${y1} ${out} ${y1} ${out} ${y1 + turn}L${out} ${y2 - turn}C${out} ${y2} ${out} ${y2} ${x2 - sign * TIP} ${y2}`;
    tip = `M${x2} ${y2}l${-sign * TIP} ${-TIP / 1.5}v${TIP / 0.75}z`;
  }
  return [svg("path", { class: name, d: path }), svg("path", { class: `${name} tip`, d: tip })];
}

function table(graph, state) {
  const edges = Object.values(state.edges || {});
  if (!edges.length) return el("p", { class: "faint" }, "No stream or edge between ranks has carried data yet.");
  const items = placed(graph, state);
  const rows = edges.map((edge) => {
    const into = edge.into || endsOf(edge, graph, items).map((item) => item.name).join(", ") || "client";
    const ranks = (edge.source_rank || 0) === (edge.into_rank || 0) ? "" : ` · rank ${edge.source_rank || 0} → ${edge.into_rank || 0}`;
    return el("tr", {}, el("td", {}, el("code", {}, edge.name), el("br"), el("span", { class: "faint" }, `${edge.source || "client"} → ${into}${ranks}`)),
      el("td", { class: "num" }, rate(edge.items_s, "items") || "–"), el("td", { class: "num" }, rate(edge.bytes_s, "B") || "–"));
  });
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Edge"), el("th", { class: "num" }, "Items"), el("th", { class: "num" }, "Bytes"))), el("tbody", {}, rows)));
}
