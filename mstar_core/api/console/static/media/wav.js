// PCM16 bytes to samples, samples to WAV files, and recordings of the microphone.

import { joined } from "../core/net.js";

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
