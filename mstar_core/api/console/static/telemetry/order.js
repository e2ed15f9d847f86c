// Order and depth of the nodes of a graph.

/** Return the names of the nodes so that each follows its sources. Edges that close a cycle do not count. */
export function orderOf(graph) {
  const nodes = (graph?.nodes || []).map((node) => node.name);
  const known = new Set(nodes);
  const into = new Map(nodes.map((name) => [name, []]));
  for (const edge of graph?.edges || []) if (known.has(edge.source) && known.has(edge.into)) into.get(edge.source).push(edge.into);
  const seen = new Set();
  const ended = [];
  const visit = (name) => {
    if (seen.has(name)) return;
    seen.add(name);
    into.get(name).forEach(visit);
    ended.push(name);
  };
  nodes.forEach(visit);
  return ended.reverse();
}

/** Return the depth of each node: 0 for those that only the client feeds, otherwise one more than its deepest source. */
export function depthsOf(graph) {
  const order = orderOf(graph);
  const place = new Map(order.map((name, index) => [name, index]));
  const depths = new Map(order.map((name) => [name, 0]));
  for (const name of order) {
    for (const edge of graph.edges) {
      if (edge.source === name && place.get(edge.into) > place.get(name)) depths.set(edge.into, Math.max(depths.get(edge.into), depths.get(name) + 1));
    }
  }
  return depths;
}
