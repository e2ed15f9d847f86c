// Waveform of live sound: the last seconds of a microphone or of playback.

import { el } from "../core/dom.js";

const BARS = 160;
const BAR_MS = 50;

/** Canvas that shows the peaks of a node's sound, the newest at the right. */
export class Scope {
  /** colour: name of a colour of the style sheet. */
  constructor(label, colour) {
    this.canvas = el("canvas", { class: "wave", role: "img", "aria-label": label, width: 640, height: 160 });
    this.colour = colour;
    this.peaks = new Float32Array(BARS);
    this.draw();
  }

  /** Show the sound of an audio node until `stop`. */
  watch(node) {
    this.stop();
    const meter = node.context.createAnalyser();
    node.connect(meter);
    const block = new Float32Array(meter.fftSize);
    this.timer = setInterval(() => {
      meter.getFloatTimeDomainData(block);
      this.peaks.copyWithin(0, 1);
      this.peaks[BARS - 1] = block.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      this.draw();
    }, BAR_MS);
  }

  stop() {
    clearInterval(this.timer);
    this.peaks.fill(0);
    this.draw();
  }

  draw() {
    const { width, height } = this.canvas;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(this.colour);
    this.peaks.forEach((peak, bar) => {
      const size = Math.max(2, Math.min(1, peak) * (height - 8));
      context.fillRect((bar * width) / BARS, (height - size) / 2, width / BARS - 1.2, size);
    });
  }
}
