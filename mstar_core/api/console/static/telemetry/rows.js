// Rows of a request's account: pure functions from a trace to figures.

import { orderOf } from "./order.js";

/** Return the rows of a waterfall in the order of the graph. computeMs: the sum that the supervisor made of the steps. */
export function rowsOf(spans, sums, graph) {
  const rows = new Map();
  const ranks = new Map();
  for (const span of spans) if (span.rank != null) ranks.set(span.node, (ranks.get(span.node) || new Set()).add(span.rank));
  for (const span of spans) {
    const key = `${span.process} ${span.node}`;
    const name = span.rank == null ? key : ranks.get(span.node).size > 1 ? `${span.node} (rank ${span.rank})` : span.node;
    const row = rows.get(key) || { name, node: span.node, rank: span.rank, place: span.rank == null ? span.process : `rank ${span.rank}`, spans: [], computeMs: 0, waits: "" };
    row.spans.push(span);
    if (span.is_open && span.kind === "compute") row.computeMs += span.busy_ms;
    if (span.waits_for) row.waits = `waits for ${span.waits_for}`;
    rows.set(key, row);
  }
  for (const sum of sums) {
    const row = rows.get(`${sum.process} ${sum.node}`);
    if (row && sum.kind === "compute") row.computeMs += sum.busy_ms;
  }
  const place = new Map(orderOf(graph).map((name, index) => [name, index]));
  const first = (row) => Math.min(...row.spans.map((span) => (span.kind === "compute" ? span.start_ms : Infinity)), ...(row.rank == null ? row.spans.map((span) => span.start_ms) : []));
  const key = (row) => [row.rank == null ? 0 : 1, row.rank == null ? 0 : place.get(row.node) ?? place.size, first(row), row.rank ?? 0];
  return [...rows.values()].sort((a, b) => compare(key(a), key(b)));
}

function compare(one, other) {
  for (let i = 0; i < one.length; i++) if (one[i] !== other[i]) return one[i] < other[i] ? -1 : 1;
  return 0;
}

/** Return the times of client and server in milliseconds and their difference, null where one is unknown. */
export function gaps(item, server) {
  return [["First output", item.ttft, server.ttft_ms], ["Total", item.total, server.total_ms]].map(([name, client, there]) =>
    ({ name, client: client ?? null, server: there ?? null, gap: client == null || there == null ? null : Math.max(0, client - there) }));
}
