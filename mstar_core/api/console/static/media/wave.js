// Waveform that grows while sound arrives.

import { el } from "../core/dom.js";
import { joined } from "../core/net.js";

/** Canvas that shows all samples so far, the played part in colour. */
export class Wave {
  constructor(label) {
    this.canvas = el("canvas", { class: "wave", role: "img", "aria-label": label, width: 1000, height: 220 });
    this.clear();
  }

  clear() { this.pieces = []; this.total = 0; this.played = 0; this.draw(); }
  push(samples) { this.pieces.push(samples); this.total += samples.length; this.schedule(); }
  setPlayed(count) { this.played = count; this.schedule(); }
  get samples() { return joined(this.pieces, Float32Array); }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  draw() {
    const { width, height } = this.canvas;
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.clearRect(0, 0, width, height);
    context.fillStyle = style.getPropertyValue("--line");
    context.fillRect(0, height / 2 - 1, width, 2);
    if (!this.total) return;
    const samples = this.samples;
    const bars = 250, step = samples.length / bars;
    const [accent, faint] = [style.getPropertyValue("--accent"), style.getPropertyValue("--faint")];
    for (let bar = 0; bar < bars; bar++) {
      let peak = 0;
      for (let i = Math.floor(bar * step); i < Math.floor((bar + 1) * step); i++) peak = Math.max(peak, Math.abs(samples[i]));
      const size = Math.max(2, peak * (height - 8));
      context.fillStyle = bar * step < this.played ? accent : faint;
      context.fillRect((bar * width) / bars, (height - size) / 2, width / bars - 1.2, size);
    }
  }
}
