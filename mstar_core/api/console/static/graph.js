// Live picture of the graph: nodes in their ranks, edges with rates. Read-only, over server-sent events.

import { el, svg } from "./dom.js";
import { call, checked, events, hasKey } from "./net.js";

const KEYED = ["ranks", "nodes", "edges", "gpus"];
const RETRY_MS = 3000;
const [WIDTH, NODE_W, NODE_H, GAP] = [380, 150, 46, 16];

const LOCAL = ["localhost", "127.0.0.1", "[::1]"];

/** Return whether the deployment shows its live view to this page: on its own host, or with an API key. */
export const maySeeDeployment = () => hasKey() || LOCAL.includes(location.hostname);

export async function watchGraph(box, note) {
  if (!maySeeDeployment()) { refused(box, note); return; }
  for (;;) {
    try {
      const answer = await checked(await call("/console/live"));
      let state = null;
      for await (const frame of events(answer)) {
        state = merged(state, frame);
        if (state) draw(box, note, state);
      }
    } catch (problem) {
      if (problem.code === "loopback_only") { refused(box, note); return; }
      note.textContent = "";
      box.replaceChildren(el("p", { class: "faint" }, "Not available now."));
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function refused(box, note) {
  note.textContent = "";
  box.replaceChildren(el("p", { class: "faint" }, "Shown on the server's own host, or with an API key."));
}

/** Apply a frame of the admin API's watch to the state. */
export function merged(state, frame) {
  if (frame.k === "snapshot") return { ...frame };
  if (frame.k !== "delta" || !state) return state;
  if (frame.deployment) state.deployment = { ...state.deployment, ...frame.deployment };
  if (frame.graph) state.graph = frame.graph;
  for (const part of KEYED) {
    const items = (state[part] ??= {});
    for (const [key, change] of Object.entries(frame.set?.[part] || {})) items[key] = { ...items[key], ...change };
    for (const key of frame.del?.[part] || []) delete items[key];
    for (const [key, counts] of Object.entries(frame.add?.[part] || {})) {
      for (const [name, value] of Object.entries(counts)) items[key] = { ...items[key], [name]: (items[key]?.[name] || 0) + value };
    }
  }
  return state;
}

function rate(value, unit) {
  if (!value) return "";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return `${(value / size).toFixed(1)} ${letter}${unit}/s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ${unit}/s`;
}

function draw(box, note, state) {
  const head = state.deployment || {};
  note.textContent = [`${head.running || 0} running`, head.waiting ? `${head.waiting} waiting` : "", head.tokens_s ? rate(head.tokens_s, "tokens") : ""].filter(Boolean).join(" · ");
  const graph = state.graph;
  if (!graph?.nodes?.length) { box.replaceChildren(el("p", { class: "faint" }, "The graph is not known yet.")); return; }
  box.replaceChildren(picture(graph, state), table(state));
}

/** One dashed frame per rank from top to bottom, its nodes in two columns. */
function picture(graph, state) {
  const ranks = new Map();
  for (const node of graph.nodes) {
    const rank = node.replicas?.[0]?.[0] ?? 0;
    ranks.set(rank, [...(ranks.get(rank) || []), node]);
  }
  const places = new Map();
  const shapes = [];
  let y = 0;
  for (const [rank, nodes] of [...ranks].sort((a, b) => a[0] - b[0])) {
    const rows = Math.ceil(nodes.length / 2);
    const height = 26 + rows * (NODE_H + GAP);
    const gpu = state.gpus?.[state.ranks?.[rank]?.gpu]?.name;
    const device = gpu || state.ranks?.[rank]?.device || "";
    shapes.push(svg("rect", { class: "rank", x: 1, y: y + 1, width: WIDTH - 2, height, rx: 10 }),
      svg("text", { class: "faint", x: 10, y: y + 17 }, `rank ${rank} ${device}${state.ranks?.[rank]?.busy ? `, ${Math.round(100 * state.ranks[rank].busy)} % busy` : ""}`));
    nodes.forEach((node, index) => {
      const isAlone = index % 2 === 0 && index === nodes.length - 1;
      places.set(node.name, { x: isAlone ? (WIDTH - NODE_W) / 2 : 20 + (index % 2) * (WIDTH - NODE_W - 40), y: y + 26 + Math.floor(index / 2) * (NODE_H + GAP), node });
    });
    y += height + 12;
  }
  const drawn = new Set();
  const wires = [];
  for (const edge of graph.edges) {
    const [from, to] = [places.get(edge.source), places.get(edge.into)];
    const name = `${edge.source}>${edge.into}`;
    if (!from || !to || edge.source === edge.into || drawn.has(name)) continue;
    drawn.add(name);
    const live = Object.values(state.edges || {}).filter((item) => item.source === edge.source && item.into === edge.into);
    const [x1, y1, x2, y2] = [from.x + NODE_W / 2, from.y + NODE_H / 2, to.x + NODE_W / 2, to.y + NODE_H / 2];
    const isMoving = live.some((item) => item.items_s > 0);
    wires.push(svg("path", { class: `wire${edge.is_stream ? " stream" : ""}${isMoving ? " moving" : ""}`, d: `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}` }));
  }
  const boxes = [...places.values()].map(({ x, y: top, node }) => {
    const live = Object.values(state.nodes || {}).filter((item) => item.name === node.name);
    const steps = live.reduce((sum, item) => sum + (item.steps_s || 0), 0);
    const words = node.name.length > 20 ? `${node.name.slice(0, 19)}…` : node.name;
    return svg("g", { class: `box${steps ? " busy" : ""}` }, svg("rect", { x, y: top, width: NODE_W, height: NODE_H, rx: 8 }),
      svg("text", { x: x + 9, y: top + 19 }, words), svg("text", { class: "faint", x: x + 9, y: top + 36 }, steps ? rate(steps, "steps") : node.replicas?.length > 1 ? `${node.replicas.length} replicas` : "idle"));
  });
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${y}`, width: "100%", role: "img", "aria-label": `Graph of ${places.size} nodes on ${ranks.size} rank${ranks.size === 1 ? "" : "s"}` }, shapes, wires, boxes);
}

function table(state) {
  const edges = Object.values(state.edges || {});
  if (!edges.length) return el("p", { class: "faint" }, "No stream or edge between ranks has carried data yet.");
  const rows = edges.map((edge) => el("tr", {}, el("td", {}, el("code", {}, edge.name), el("br"), el("span", { class: "faint" }, `${edge.source || "?"} → ${edge.into || "?"}`)),
    el("td", { class: "num" }, rate(edge.items_s, "items") || "–"), el("td", { class: "num" }, rate(edge.bytes_s, "B") || "–")));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Edge"), el("th", {}, "Items"), el("th", {}, "Bytes"))), el("tbody", {}, rows)));
}
