// Elements without markup strings: text from the network is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. `on…` functions listen, `class` and other strings are attributes, true sets an empty one. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

let fields = 0;

/** Return a labelled control. */
export function field(label, control) {
  control.id ||= `f${++fields}`;
  return el("div", { class: "field" }, el("label", { for: control.id }, label), control);
}

export function select(values, chosen) {
  return el("select", {}, values.map((value) => el("option", { value, selected: value === chosen }, value)));
}

/** Return a definition list of figures and a function that sets one of them. */
export function figures(names) {
  const values = Object.fromEntries(names.map((name) => [name, el("dd", {}, "–")]));
  const list = el("dl", { class: "figures" }, names.map((name) => el("div", {}, el("dt", {}, name), values[name])));
  return { list, set: (name, text) => { values[name].textContent = text; } };
}

export function milliseconds(value) {
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${Math.round(value)} ms`;
}

/** Return a button that saves a blob. */
export function download(label, name, blob) {
  const url = URL.createObjectURL(blob);
  return el("button", { type: "button", onclick: () => el("a", { href: url, download: name }).click() }, label);
}
