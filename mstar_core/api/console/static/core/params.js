// Controls for the parameters that a model publishes, made from their JSON schema.

import { el, field, select } from "./dom.js";

const UNSET = "default";

/** Parameters that are set elsewhere on the page, or whose effect the page cannot show. */
const OMITTED = ["voice", "ignore_eos", "output_format", "output_dtype", "partial_images", "size", "timeout_s", "priority", "stop",
  "robot_state", "image_mask", "return_normalized", "task", "skip_predictor", "rollout_horizon", "stream_rollout", "mpc", "goal_hidden_fill"];

/** Every model accepts a seed, even if its own parameters do not list one. */
const SEED = { type: "integer", minimum: 0, description: "the same seed gives the same answer" };

/** Return integer, number, boolean, choice or text; null for lists and objects, which have no control. */
export function kindOf(schema) {
  if (schema.enum) return "choice";
  const type = [schema.type].flat().find((each) => each && each !== "null");
  return { integer: "integer", number: "number", boolean: "boolean", string: "text" }[type] ?? null;
}

/** Return the value of a control's text; undefined if it is empty, so that the model's default applies. */
export function valueOf(kind, text) {
  if (text === "" || text === UNSET) return undefined;
  if (kind === "integer" || kind === "number") return Number(text);
  if (kind === "boolean") return text === "true";
  return text;
}

/** Return the parameters that get a control: [name, schema], the first names first. */
export function shownParams(properties, { first = [], skip = [] } = {}) {
  const known = { ...properties, seed: properties.seed ?? SEED };
  const names = Object.keys(known).filter((name) => kindOf(known[name]) && !OMITTED.includes(name) && !skip.includes(name));
  const order = (name) => (first.includes(name) ? first.indexOf(name) : first.length);
  return names.sort((a, b) => order(a) - order(b)).map((name) => [name, known[name]]);
}

/** Controls of a model's parameters. first: names shown at once, the others are behind "More parameters". */
export class Params {
  constructor(card, { first = ["seed", "temperature"], skip = [] } = {}) {
    this.controls = shownParams(card.parameters.properties, { first, skip }).map(([name, schema]) => {
      const control = controlOf(schema);
      return { name, kind: kindOf(schema), control, field: field(name.replaceAll("_", " "), control, schema.description) };
    });
    const [shown, more] = [true, false].map((isFirst) => this.controls.filter(({ name }) => first.includes(name) === isFirst));
    this.fields = shown.map((each) => each.field);
    this.more = more.length ? el("details", { class: "more" }, el("summary", {}, "More parameters"), el("div", { class: "fields" }, more.map((each) => each.field))) : null;
  }

  /** Return the values that were set. */
  values() {
    const given = this.controls.map(({ name, kind, control }) => [name, valueOf(kind, control.value)]);
    return Object.fromEntries(given.filter(([, value]) => value !== undefined));
  }

  /** Set the controls to these values, and the others to the model's defaults. */
  fill(values) {
    for (const { name, kind, control } of this.controls) {
      const value = values[name];
      control.value = value === undefined ? (kind === "choice" || kind === "boolean" ? UNSET : "") : String(value);
    }
  }

  set(name, value) {
    const found = this.controls.find((each) => each.name === name);
    if (found) found.control.value = value ?? "";
  }
}

function controlOf(schema) {
  const kind = kindOf(schema);
  if (kind === "choice") return select([UNSET, ...schema.enum.filter((each) => each != null)], UNSET);
  if (kind === "boolean") return select([UNSET, "true", "false"], UNSET);
  const standard = schema.default == null ? "auto" : String(schema.default);
  if (kind === "text") return el("input", { type: "text", placeholder: standard });
  const step = kind === "integer" ? 1 : "any";
  const low = schema.minimum ?? schema.exclusiveMinimum;
  return el("input", { type: "number", step, min: low, max: schema.maximum > 1e9 ? null : schema.maximum, placeholder: standard });
}
