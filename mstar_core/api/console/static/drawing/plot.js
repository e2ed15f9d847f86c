// Plots of numbers.

import { el, svg } from "../core/dom.js";

const [W, H, PAD] = [200, 110, 6];

/**
 * Return a figure with the series over a common scale.
 *
 * series: lists of numbers. joined: draw lines; without, the values are dots because neighbours do not belong together.
 * mark: index of a value that is drawn larger.
 */
export function plot(series, caption, { joined = true, mark = -1 } = {}) {
  const all = series.flat();
  const low = Math.min(...all), high = Math.max(...all);
  const most = Math.max(...series.map((values) => values.length));
  const x = (i) => PAD + ((W - 2 * PAD) * i) / Math.max(1, most - 1);
  const y = (value) => H - PAD - ((H - 2 * PAD) * (value - low)) / (high - low || 1);
  const zero = low < 0 && high > 0 ? [svg("line", { x1: PAD, x2: W - PAD, y1: y(0), y2: y(0) })] : [];
  const shapes = series.flatMap((values, number) => {
    const name = `series${number % 8}`;
    if (joined && values.length > 1) return [svg("path", { class: name, d: values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("") })];
    return values.map((value, i) => svg("circle", { class: `${name}${i === mark ? " mark" : ""}`, cx: x(i), cy: y(value), r: i === mark ? 6 : 3 }));
  });
  return el("figure", {}, svg("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${caption}: from ${low.toPrecision(3)} to ${high.toPrecision(3)}` }, zero, shapes),
    el("figcaption", {}, `${caption} · ${low.toPrecision(4)} to ${high.toPrecision(4)}`));
}
