// The microphone as a stream of PCM16.

import { Failure } from "../core/net.js";

const PIECE_S = 0.04;
const WANTED = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };

/** Return the microphone as a node of a context. Firefox cannot convert its rate: then the context has the microphone's. */
function sourceOf(stream, rate) {
  const context = new AudioContext({ sampleRate: rate });
  try {
    return context.createMediaStreamSource(stream);
  } catch {
    context.close();
    return new AudioContext().createMediaStreamSource(stream);
  }
}

/** An open microphone. source: its audio node. */
export class Capture {
  /** Open the microphone in a click. onPiece: called with each piece of PCM16; onEnd: once, if the device goes. */
  static async open(rate, onPiece, onEnd) {
    if (!navigator.mediaDevices) throw new Failure("browsers allow the microphone only on localhost and with HTTPS");
    const capture = new Capture(await navigator.mediaDevices.getUserMedia({ audio: WANTED }));
    try {
      await capture.begin(rate, onPiece, onEnd);
      return capture;
    } catch (problem) {
      capture.close();
      throw problem;
    }
  }

  constructor(stream) { this.stream = stream; }

  async begin(rate, onPiece, onEnd) {
    this.source = sourceOf(this.stream, rate);
    const { context } = this.source;
    await context.audioWorklet.addModule("/assets/media/capture_worklet.js");
    const node = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0, processorOptions: { rate, length: Math.round(rate * PIECE_S) } });
    node.port.onmessage = ({ data }) => onPiece(data);
    this.stream.getTracks()[0].onended = onEnd;
    this.source.connect(node);
    await context.resume();
  }

  /** Replace the sound by silence. It goes on arriving, so that the server hears the end of a turn. */
  mute(isMuted) { for (const track of this.stream.getTracks()) track.enabled = !isMuted; }

  close() {
    for (const track of this.stream.getTracks()) { track.onended = null; track.stop(); }
    this.source?.context.close();
  }
}
