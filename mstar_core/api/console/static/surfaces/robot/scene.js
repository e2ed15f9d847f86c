// Picture of the simulated arm with its targets and cameras, and its movement over time.

import { el, svg } from "../../core/dom.js";
import * as world from "../../drawing/arm.js";
import { paint } from "../../drawing/pixels.js";

const VIEW = 1.15;
const LEAST_STEP_MS = 8;

export class ArmScene {
  constructor() {
    this.named = 0;
    this.picture = svg("svg", { class: "scene", viewBox: `${-VIEW} ${-VIEW} ${2 * VIEW} ${2 * VIEW}`, role: "img", "aria-label": "The arm and its targets from above" });
    this.cameras = world.CAMERAS.map((name) => el("canvas", { class: "camera", role: "img", "aria-label": `Camera: ${name}` }));
    const views = this.cameras.map((canvas, i) => el("figure", {}, canvas, el("figcaption", {}, `camera: ${world.CAMERAS[i]}`)));
    this.box = el("div", { class: "simulated arm" }, el("div", { class: "stage" }, this.picture), el("div", { class: "cameras" }, views));
    this.draw();
  }

  get state() { return { joints: this.joints, targets: this.targets }; }
  get distance() { return world.distance(this.joints, this.targets[this.named]); }
  get isReached() { return this.distance <= world.TOLERANCE; }

  /** Put the arm and the targets at random places. */
  draw() {
    Object.assign(this, world.draw());
    this.way = [];
    this.show();
  }

  name(index) {
    this.named = index;
    this.show();
  }

  /** Make the movements of a chunk within `ms`; `onStep` is called after each. A slow screen draws fewer of them. */
  async play(rows, ms, onStep) {
    const began = performance.now();
    for (const [step, movement] of rows.entries()) {
      if (this.isReached) break;
      this.joints = world.moved(this.joints, movement);
      this.way.push(world.points(this.joints)[1]);
      onStep();
      const rest = began + ((step + 1) * ms) / rows.length - performance.now();
      if (rest < LEAST_STEP_MS) continue;
      this.show();
      await new Promise((resolve) => setTimeout(resolve, rest));
    }
    this.show();
  }

  show() {
    const [elbow, tip] = world.points(this.joints);
    const segment = (from, to, name) => svg("line", { class: name, x1: from[0], y1: -from[1], x2: to[0], y2: -to[1] });
    const targets = this.targets.map(([x, y], i) => svg("circle", { class: `target ${world.NAMES[i]}${i === this.named ? " named" : ""}`, cx: x, cy: -y, r: world.RADIUS }));
    const way = svg("path", { class: "way", d: this.way.map(([x, y], i) => `${i ? "L" : "M"}${x} ${-y}`).join("") });
    this.picture.replaceChildren(...targets, way, segment([0, 0], elbow, "upper"), segment(elbow, tip, "lower"), svg("circle", { class: "tip", cx: tip[0], cy: -tip[1], r: 0.06 }));
    world.render(this.state).forEach((pixels, i) => paint(this.cameras[i], pixels, world.SIDE));
  }
}
