// Places of a graph's picture: one frame per rank or group of ranks, the placed nodes in them, arrows between them.

import { depthsOf } from "./order.js";

export const NODE = { width: 158, height: 46 };
const [GAP_X, GAP_Y, PAD, TITLE, ACROSS] = [20, 24, 14, 24, 2];
export const WIDTH = 2 * PAD + ACROSS * NODE.width + GAP_X;
const READY = "ready";

const same = (one, other) => one.length === other.length && one.every((rank, i) => rank === other[i]);
const titleOf = (ranks) => (ranks.length ? `rank ${ranks.join("+")}` : "not placed");

/**
 * Return each node at each of its places: {name, ranks}, ranks being a tensor-parallel group or one rank.
 *
 * A node that is an alias of another lists the rank of the other too. It is drawn where it reports, and at all of its places if
 * it reports nowhere.
 */
export function placed(graph, state) {
  return graph.nodes.flatMap((node) => {
    const groups = node.replicas?.length ? node.replicas : [[]];
    const reporting = groups.filter((ranks) => ranks.some((rank) => state.nodes?.[`${node.name}@${rank}`]));
    return (reporting.length ? reporting : groups).map((ranks) => ({ name: node.name, ranks }));
  });
}

/** Return the placed nodes at the end of a live edge, none if the edge ends at a rank without a known node. */
export function endsOf(edge, graph, items) {
  const there = items.filter((item) => item.ranks.includes(edge.into_rank || 0));
  if (edge.into) return there.filter((item) => item.name === edge.into);
  const named = graph.edges.filter((each) => each.name === edge.name && each.source === edge.source).map((each) => each.into);
  const found = there.filter((item) => named.includes(item.name));
  if (found.length) return found;
  return there.length === 1 ? there : [];
}

export function startsOf(edge, items) {
  return items.filter((item) => item.name === edge.source && item.ranks.includes(edge.source_rank || 0));
}

/** Return the frames, boxes and wires of the picture, and its height. */
export function layout(graph, state) {
  const items = placed(graph, state);
  const depths = depthsOf(graph);
  const groups = [];
  for (const item of items) if (!groups.some((ranks) => same(ranks, item.ranks))) groups.push(item.ranks);
  // Ranks that run no node of their own, such as followers without a group, are shown as well.
  for (const rank of Object.values(state.ranks || {})) if (!groups.some((ranks) => ranks.includes(rank.rank || 0))) groups.push([rank.rank || 0]);
  groups.sort((a, b) => (a[0] ?? 1e9) - (b[0] ?? 1e9) || b.length - a.length);
  const frames = [], boxes = [];
  let y = 0;
  for (const ranks of groups) {
    const live = ranks.map((rank) => state.ranks?.[rank]).filter(Boolean);
    const isDown = live.some((rank) => rank.state && rank.state !== READY);
    const rows = rowsOf(items.filter((item) => same(item.ranks, ranks)), depths);
    const height = TITLE + Math.max(1, rows.length) * (NODE.height + GAP_Y) - GAP_Y + PAD;
    frames.push({ y, height, ranks, title: titleOf(ranks), live, isDown });
    rows.forEach((row, at) => {
      const width = row.length * NODE.width + (row.length - 1) * GAP_X;
      row.forEach((item, column) => boxes.push({ ...item, isDown, x: (WIDTH - width) / 2 + column * (NODE.width + GAP_X), y: y + TITLE + at * (NODE.height + GAP_Y) }));
    });
    y += height + GAP_Y;
  }
  return { frames, boxes, wires: wiresOf(graph, state, boxes), height: Math.max(0, y - GAP_Y + 2) };
}

/** Return rows of at most two nodes: each depth begins a new row. */
function rowsOf(items, depths) {
  const rows = [];
  for (const depth of [...new Set(items.map((item) => depths.get(item.name)))].sort((a, b) => a - b)) {
    const level = items.filter((item) => depths.get(item.name) === depth);
    for (let at = 0; at < level.length; at += ACROSS) rows.push(level.slice(at, at + ACROSS));
  }
  return rows;
}

/** Return one wire per pair of boxes. A node sends to the target in its own frame, if there is one, else to all of them. */
function wiresOf(graph, state, boxes) {
  const found = new Map();
  const add = (from, to, edge, rate = 0) => {
    if (from === to) return;
    const key = `${boxes.indexOf(from)}>${boxes.indexOf(to)}`;
    const wire = found.get(key) || { from, to, isStream: false, itemsPerSecond: 0 };
    wire.isStream ||= Boolean(edge.is_stream);
    wire.itemsPerSecond += from.isDown || to.isDown ? 0 : rate;
    found.set(key, wire);
  };
  for (const edge of graph.edges) {
    if (!edge.source || !edge.into || edge.source === edge.into) continue;
    for (const from of boxes.filter((box) => box.name === edge.source)) {
      const targets = boxes.filter((box) => box.name === edge.into);
      const near = targets.filter((box) => same(box.ranks, from.ranks));
      for (const to of near.length ? near : targets) add(from, to, edge);
    }
  }
  for (const edge of Object.values(state.edges || {})) {
    for (const from of startsOf(edge, boxes)) for (const to of endsOf(edge, graph, boxes)) add(from, to, edge, edge.items_s || 0);
  }
  return [...found.values()];
}
