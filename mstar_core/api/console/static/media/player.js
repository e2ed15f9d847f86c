// Playback of sound while it arrives, through WebAudio.

/** Plays PCM16 as it arrives. `open` must run in a click, because browsers start sound only then. */
export class Player {
  /** onPlayed(count, isOver, id): so many samples of the sound `id` were played. */
  constructor(onPlayed = () => {}) {
    this.onPlayed = onPlayed;
    this.played = 0;
    this.cleared = [];
  }

  open(rate) {
    this.context = new AudioContext({ sampleRate: rate });
    this.ready = this.context.audioWorklet.addModule("/assets/media/worklet.js").then(() => {
      this.node = new AudioWorkletNode(this.context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
      this.node.port.onmessage = ({ data }) => this.take(data);
      this.node.connect(this.context.destination);
      return this.context.resume();
    });
    return this.ready;
  }

  take({ id, played, isOver = false, isCleared }) {
    this.played = played;
    if (id !== null) this.onPlayed(played, isOver, id);
    if (isCleared) this.cleared.shift()?.();
    if (isOver) this.context.close();
  }

  /** Queue samples. id: of the sound that they belong to. */
  push(samples, id = 0) { this.ready.then(() => this.node.port.postMessage({ id, samples })); }
  end() { this.ready.then(() => this.node.port.postMessage("end")); }

  /** Drop the queued samples at once. `onPlayed` has got the count of played ones when the promise resolves. */
  async clear() {
    await this.ready;
    if (!this.context || this.context.state === "closed") return;
    await new Promise((resolve) => { this.cleared.push(resolve); this.node.port.postMessage("clear"); });
  }

  stop() { if (this.context && this.context.state !== "closed") this.context.close(); }
}
