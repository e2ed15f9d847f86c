// Controls of a chat's requests that are not parameters of the model: adapter, thinking, format of the answer, tools.

import { button, el, field } from "../../core/dom.js";
import { Failure } from "../../core/net.js";

const EFFORTS = { "": "default", none: "off", low: "low", medium: "medium", high: "high" };
const FORMATS = { "": "text", json_object: "JSON", json_schema: "JSON schema" };
const EXAMPLE_TOOLS = [{ name: "weather", description: "The weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];
const EXAMPLE_SCHEMA = { type: "object", properties: { answer: { type: "string" }, certainty: { type: "number" } }, required: ["answer", "certainty"] };

function choice(words, attributes = {}) {
  return el("select", attributes, Object.entries(words).map(([value, text]) => el("option", { value }, text)));
}

/** Return a field of JSON with a button that fills in an example. */
function jsonArea(label, what, example) {
  const area = el("textarea", { rows: 8, spellcheck: "false", class: "code" });
  const fill = () => { area.value = JSON.stringify(example, null, 1); area.focus(); area.setSelectionRange(0, 0); area.scrollTop = 0; };
  return { area, box: el("div", { class: "stack" }, field(label, area), el("div", { class: "row" }, button(`Example ${what}`, fill, { class: "small" }))) };
}

/** Return the value of a field of JSON. Throws Failure, with the field's name, for other text. */
function parsed(text, name) {
  try { return JSON.parse(text); } catch (problem) { throw new Failure(`${name}: ${problem.message}`); }
}

/** Return the tools of a field: one or a list, as the route has them or bare. Throws Failure. */
export function toolsOf(text) {
  if (!text.trim()) return [];
  const tools = [parsed(text, "Tools")].flat();
  if (!tools.every((tool) => typeof (tool?.function || tool)?.name === "string")) throw new Failure("Tools: each needs a name");
  return tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

/** Return the response_format of a kind. Throws Failure for a schema that is not JSON. */
export function formatOf(kind, text) {
  if (kind === "json_schema") return { type: kind, json_schema: { name: "answer", schema: parsed(text, "JSON schema"), strict: true } };
  return kind ? { type: kind } : undefined;
}

/** Controls that the capabilities of a model offer. others: adapters beside it. */
export class Controls {
  constructor(card, others = []) {
    const can = (capability) => (card.capabilities || []).includes(capability);
    this.card = card;
    this.model = choice(Object.fromEntries([card, ...others].map(({ id }) => [id, id])));
    this.effort = choice(EFFORTS);
    this.format = choice(FORMATS, { onchange: () => this.draw() });
    this.schema = jsonArea("JSON schema", "schema", EXAMPLE_SCHEMA);
    this.tools = jsonArea("Tools: functions as a JSON list", "tools", EXAMPLE_TOOLS);
    this.fields = [others.length ? field("Model", this.model) : null, can("reasoning_effort") ? field("Thinking", this.effort) : null,
      can("structured_outputs") ? field("Answer as", this.format) : null].filter(Boolean);
    this.folds = can("tools") ? [el("details", { class: "more" }, el("summary", {}, "Tools"), this.tools.box)] : [];
    this.below = can("structured_outputs") ? [this.schema.box] : [];
    this.draw();
  }

  draw() { this.schema.box.hidden = this.format.value !== "json_schema"; }

  /** Return the fields of a request. Throws Failure for JSON that is broken. */
  given() {
    const tools = toolsOf(this.tools.area.value);
    const format = formatOf(this.format.value, this.schema.area.value);
    return { model: this.model.value || this.card.id, ...(tools.length ? { tools } : {}), ...(format ? { response_format: format } : {}),
      ...(this.effort.value ? { reasoning_effort: this.effort.value } : {}) };
  }

  /** Return what is kept in the history, and take it over again. */
  kept() { return { effort: this.effort.value, format: this.format.value, schema: this.schema.area.value, tools: this.tools.area.value }; }

  fill({ effort = "", format = "", schema = "", tools = "" } = {}) {
    this.effort.value = effort;
    this.format.value = format;
    this.schema.area.value = schema;
    this.tools.area.value = tools;
    this.draw();
  }
}
