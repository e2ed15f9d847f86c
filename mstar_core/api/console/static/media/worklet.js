// AudioWorklet processor that plays queued samples. It reports the sound that it plays, and the number of its samples played.

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = [];
    this.offset = 0;
    this.id = null;
    this.played = 0;
    this.isEnded = false;
    this.port.onmessage = ({ data }) => {
      if (data === "end") this.isEnded = true;
      else if (data === "clear") { this.queue = []; this.offset = 0; this.report({ isCleared: true }); }
      else this.queue.push(data);
    };
  }

  report(facts = {}) { this.port.postMessage({ id: this.id, played: this.played, ...facts }); }

  process(inputs, [output]) {
    const [first, ...others] = output;
    let at = 0;
    while (at < first.length && this.queue.length) {
      const { id, samples } = this.queue[0];
      if (id !== this.id) {
        if (this.id !== null) this.report();
        this.id = id;
        this.played = 0;
      }
      const count = Math.min(first.length - at, samples.length - this.offset);
      first.set(samples.subarray(this.offset, this.offset + count), at);
      at += count;
      this.offset += count;
      this.played += count;
      if (this.offset === samples.length) { this.queue.shift(); this.offset = 0; }
    }
    for (const other of others) other.set(first);
    const isOver = this.isEnded && !this.queue.length;
    if (isOver || (at && !this.queue.length) || currentFrame % 2048 === 0) this.report({ isOver });
    return !isOver;
  }
}

registerProcessor("playback", Playback);
