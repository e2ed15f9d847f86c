// The simulated table of vjepa2_ac:mini: the block, its goal and its way, moved by hand or by plans.

import { el, field, svg } from "../../core/dom.js";
import * as block from "../../drawing/block.js";
import { paint, pngOf } from "../../drawing/pixels.js";

const MOVE_MS = 350;
const SIZE = 2 * block.VIEW;

/** The block and its goal. onchange: called when the user moves one of them. */
export class Table {
  constructor() {
    this.onchange = () => {};
    this.canvas = el("canvas", { class: "scene", role: "img", "aria-label": "The table from above, as the model sees it" });
    this.over = svg("svg", { viewBox: `${-block.VIEW} ${-block.VIEW} ${SIZE} ${SIZE}`, "aria-hidden": "true" });
    this.sliders = ["now", "goal"].flatMap((what) => ["x", "y"].map((name, axis) => {
      const input = el("input", { type: "range", min: -block.REACH, max: block.REACH, step: 0.005, oninput: () => { this[what] = this[what].map((value, i) => (i === axis ? Number(input.value) : value)); this.restartHere(); } });
      return { what, axis, input, field: field(`${what === "now" ? "block" : "goal"} ${name}`, input) };
    }));
    this.box = el("div", { class: "simulated" }, el("div", { class: "stage" }, this.canvas, this.over), el("div", { class: "stack" }, this.sliders.map((each) => each.field)));
    this.draw();
  }

  get distance() { return block.distance(this.now, this.goal); }
  get isReached() { return this.distance <= block.TOLERANCE; }
  get state() { return block.pose(this.now); }
  get fastest() { return block.FASTEST; }

  /** Put block and goal at random places. */
  draw() {
    Object.assign(this, block.draw());
    this.restartHere();
  }

  restartHere() {
    this.start = this.now;
    this.way = [this.now];
    this.show();
    this.onchange();
  }

  /** Begin a new way. A block at the goal goes back to where it was placed. */
  restart() {
    if (this.isReached) this.now = this.start;
    this.way = [this.now];
    this.show();
  }

  async pictures() {
    const [now, goal] = await Promise.all([pngOf(block.render(this.now), block.SIDE, "now"), pngOf(block.render(this.goal), block.SIDE, "goal")]);
    return { now, goal };
  }

  /** Make one planned move, drawn over a moment. Reduced motion jumps. */
  async move(action) {
    const from = this.now, to = block.moved(from, action);
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) await glide((share) => { this.now = from.map((value, i) => value + share * (to[i] - value)); this.show(); });
    this.now = to;
    this.way.push(to);
    this.show();
  }

  show() {
    paint(this.canvas, block.render(this.now), block.SIDE);
    const at = ([x, y]) => `${x} ${-y}`;
    this.over.replaceChildren(
      svg("rect", { class: "goal", x: this.goal[0] - block.HALF, y: -this.goal[1] - block.HALF, width: 2 * block.HALF, height: 2 * block.HALF }),
      svg("path", { class: "way", d: [...this.way, this.now].map((place, i) => `${i ? "L" : "M"}${at(place)}`).join("") }),
      ...this.way.map(([x, y]) => svg("circle", { class: "stop", cx: x, cy: -y, r: 0.004 })));
    for (const { what, axis, input } of this.sliders) input.value = this[what][axis];
  }
}

/** Call `step` with shares from 0 to 1, about 60 times a second. Frames of the screen would stop in a hidden tab. */
function glide(step) {
  const began = performance.now();
  return new Promise((resolve) => {
    const next = () => {
      const share = Math.min(1, (performance.now() - began) / MOVE_MS);
      step(share);
      if (share < 1) setTimeout(next, 16);
      else resolve();
    };
    next();
  });
}
