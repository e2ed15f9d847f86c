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
export function field(label, control, hint = "") {
  control.id ||= `f${++fields}`;
  return el("div", { class: "field", title: hint || null }, el("label", { for: control.id }, label), control);
}

export function select(values, chosen) {
  return el("select", {}, values.map((value) => el("option", { value, selected: value === chosen }, value)));
}

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", ...attributes, onclick }, label);
}

/** Return a definition list of figures with functions that set one of them and clear all. */
export function figures(names) {
  const values = Object.fromEntries(names.map((name) => [name, el("dd", {}, "–")]));
  const list = el("dl", { class: "figures" }, names.map((name) => el("div", {}, el("dt", {}, name), values[name])));
  return {
    list,
    set: (name, text) => { values[name].textContent = text; },
    clear: () => { for (const value of Object.values(values)) value.textContent = "–"; },
  };
}

export function milliseconds(value) {
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${Math.round(value)} ms`;
}

/** Return a count with its noun: "1 piece", "2 pieces". */
export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** Return a button that saves a blob. */
export function download(label, name, blob) {
  return button(label, () => {
    const url = URL.createObjectURL(blob);
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }, { class: "small" });
}

const COPIED_MS = 1500;

/** Return a button that copies the text that `text` returns. */
export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    await navigator.clipboard.writeText(text());
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = label; }, COPIED_MS);
  }, { class: "small" });
  return made;
}
