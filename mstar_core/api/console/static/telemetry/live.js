// The deployment's live state over server-sent events, and who may see it.

import { call, checked, events, hasKey } from "../core/net.js";

const KEYED = ["ranks", "nodes", "edges", "gpus"];
const RETRY_MS = 3000;
const LOCAL = ["localhost", "127.0.0.1", "[::1]"];

let graph = null;

/** Return the graph of the last state, null before the first. */
export const knownGraph = () => graph;

/** Return whether the deployment shows its live view to this page: on its own host, or with an API key. */
export const maySeeDeployment = () => hasKey() || LOCAL.includes(location.hostname);

/** Call `show` with each state, `refuse` if this page may not see it, `lose` while the view is not available. */
export async function watch(show, refuse, lose) {
  if (!maySeeDeployment()) { refuse(); return; }
  for (;;) {
    try {
      const answer = await checked(await call("/console/live"));
      let state = null;
      for await (const frame of events(answer)) {
        state = merged(state, frame);
        graph = state?.graph || graph;
        if (state) show(state);
      }
    } catch (problem) {
      if (problem.code === "loopback_only") { refuse(); return; }
      lose();
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
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
