// Calls of functions in an answer: collected from a stream, shown as cards, answered by the reader.

import { button, el, field } from "../../core/dom.js";

/** Add the pieces of calls in one delta to the list of calls: {id, name, arguments}. */
export function takeCalls(calls, pieces) {
  for (const { index = 0, id, function: { name, arguments: text } = {} } of pieces) {
    calls[index] ??= { id: "", name: "", arguments: "" };
    calls[index].id ||= id || "";
    calls[index].name ||= name || "";
    calls[index].arguments += text || "";
  }
}

/** Return JSON text with indentation; text that is not JSON, such as the beginning of one, as it is. */
export function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Return whether an answer waits for results. */
export const isOpen = ({ calls = [], results }) => calls.length > 0 && !results;

/**
 * Return the cards of a message's calls. onResults(texts by id) is called with what the reader entered.
 *
 * Calls that have results show them. Without onResults the cards show the calls alone, as while they arrive.
 */
export function callCards({ calls = [], results }, onResults) {
  if (!calls.length) return [];
  const inputs = results || !onResults ? [] : calls.map(({ name }) => el("textarea", { rows: 2, placeholder: "Text or JSON", "aria-label": `Result of ${name}` }));
  const cards = calls.map(({ id, name, arguments: text }, index) => el("section", { class: "call", "aria-label": `Call of ${name}` },
    el("p", { class: "head" }, el("span", { class: "badge" }, "Tool"), el("code", {}, name)),
    el("pre", { tabindex: 0, "aria-label": "Arguments" }, pretty(text)),
    results ? [el("span", { class: "label" }, "Result"), el("pre", { tabindex: 0, "aria-label": "Result" }, pretty(results[id] ?? ""))] : inputs[index] ? field("Result", inputs[index]) : null));
  if (!inputs.length) return cards;
  const send = () => onResults(Object.fromEntries(calls.map(({ id }, index) => [id, inputs[index].value.trim()])));
  for (const input of inputs) input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    const empty = inputs.find((each) => !each.value.trim());
    if (empty) empty.focus(); else send();
  });
  return [...cards, el("div", { class: "row" }, button(calls.length > 1 ? "Send results" : "Send result", send, { class: "small primary" }))];
}
