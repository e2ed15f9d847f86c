// AudioWorklet processor that turns a microphone into pieces of PCM16.

import { Downsampler } from "./downsampler.js";

class Capture extends AudioWorkletProcessor {
  /** processorOptions: rate of the pieces, and their length in samples. */
  constructor({ processorOptions: { rate, length } }) {
    super();
    this.downsampler = new Downsampler(sampleRate, rate);
    this.piece = new Int16Array(length);
    this.filled = 0;
  }

  process([input]) {
    if (!input.length) return true; // the microphone has not begun
    for (const value of this.downsampler.push(input[0])) {
      this.piece[this.filled++] = Math.max(-1, Math.min(1, value)) * 32767;
      if (this.filled === this.piece.length) {
        this.port.postMessage(this.piece.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("capture", Capture);
