// AudioWorklet processor that plays queued samples. It reports the number of samples played.

class Playback extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = [];
    this.offset = 0;
    this.played = 0;
    this.isStarted = false;
    this.isEnded = false;
    this.underruns = 0;
    this.port.onmessage = ({ data }) => {
      if (data === "end") this.isEnded = true;
      else { this.queue.push(data); this.isStarted = true; }
    };
  }

  process(inputs, [output]) {
    const [first, ...others] = output;
    let at = 0;
    while (at < first.length && this.queue.length) {
      const chunk = this.queue[0];
      const count = Math.min(first.length - at, chunk.length - this.offset);
      first.set(chunk.subarray(this.offset, this.offset + count), at);
      at += count;
      this.offset += count;
      if (this.offset === chunk.length) { this.queue.shift(); this.offset = 0; }
    }
    for (const other of others) other.set(first);
    this.played += at;
    if (at < first.length && this.isStarted && !this.isEnded) this.underruns += 1;
    const isOver = this.isEnded && !this.queue.length;
    if (isOver || currentFrame % 2048 === 0) this.port.postMessage({ played: this.played, isOver, underruns: this.underruns });
    return !isOver;
  }
}

registerProcessor("playback", Playback);
