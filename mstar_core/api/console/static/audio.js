// Streamed PCM16: playback through WebAudio, a waveform that grows, WAV files.

import { el } from "./dom.js";
import { joined } from "./net.js";

/** Plays PCM16 as it arrives. `open` must run in a click, because browsers start sound only then. */
export class Player {
  constructor(onPlayed = () => {}) {
    this.onPlayed = onPlayed;
    this.played = 0;
  }

  open(rate) {
    this.context = new AudioContext({ sampleRate: rate });
    this.ready = this.context.audioWorklet.addModule("/assets/worklet.js").then(() => {
      this.node = new AudioWorkletNode(this.context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
      this.node.port.onmessage = ({ data }) => {
        this.played = data.played;
        this.onPlayed(data.played, data.isOver);
        if (data.isOver) this.context.close();
      };
      this.node.connect(this.context.destination);
      return this.context.resume();
    });
    return this.ready;
  }

  push(samples) { this.ready.then(() => this.node.port.postMessage(samples)); }
  end() { this.ready.then(() => this.node.port.postMessage("end")); }
  stop() { if (this.context && this.context.state !== "closed") this.context.close(); }
}

/** Turns bytes of PCM16 of any split into floats. */
export class Pcm {
  constructor() { this.rest = new Uint8Array(0); }

  push(bytes) {
    const all = this.rest.length ? joined([this.rest, bytes], Uint8Array) : bytes;
    const even = all.length - (all.length % 2);
    this.rest = all.slice(even);
    const view = new DataView(all.buffer, all.byteOffset, even);
    const samples = new Float32Array(even / 2);
    for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true) / 32768;
    return samples;
  }
}

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

/** Return a WAV file of mono floats. */
export function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, value) => [...value].forEach((char, i) => view.setUint8(at + i, char.charCodeAt(0)));
  text(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, value)) * 32767, true));
  return new Blob([view.buffer], { type: "audio/wav" });
}

/** Record the microphone until `stop` is called; returns a WAV file of 16 kHz. */
export async function microphone() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  const ended = new Promise((resolve) => { recorder.onstop = resolve; });
  recorder.start();
  return async () => {
    recorder.stop();
    await ended;
    stream.getTracks().forEach((track) => track.stop());
    const context = new OfflineAudioContext(1, 1, 16000);
    const sound = await context.decodeAudioData(await new Blob(parts).arrayBuffer());
    return new File([wav(sound.getChannelData(0), 16000)], "microphone.wav", { type: "audio/wav" });
  };
}
