// Lower sample rates, for microphones whose rate the browser does not convert.

/** Converts mono floats that come in pieces: each sample is the mean of the input over its duration. */
export class Downsampler {
  constructor(from, to) {
    this.step = from / to;
    this.left = this.step;
    this.sum = 0;
  }

  push(samples) {
    if (this.step === 1) return samples;
    const made = [];
    for (const sample of samples) {
      let weight = 1;
      for (; weight >= this.left; this.sum = 0, this.left = this.step) {
        made.push((this.sum + this.left * sample) / this.step);
        weight -= this.left;
      }
      this.sum += weight * sample;
      this.left -= weight;
    }
    return Float32Array.from(made);
  }
}
