// Playback of sound while it arrives, through WebAudio.

/** Plays PCM16 as it arrives. `open` must run in a click, because browsers start sound only then. */
export class Player {
  constructor(onPlayed = () => {}) {
    this.onPlayed = onPlayed;
    this.played = 0;
  }

  open(rate) {
    this.context = new AudioContext({ sampleRate: rate });
    this.ready = this.context.audioWorklet.addModule("/assets/media/worklet.js").then(() => {
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
