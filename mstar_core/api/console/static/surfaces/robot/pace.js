// Ticks of a control loop: when each is due, and which deadlines were missed. Pure.

/**
 * Counts of a loop with a period in ms. Tick k is due at k periods.
 *
 * An answer that comes after its tick's period is late. Ticks that passed meanwhile are skipped. Both are missed deadlines.
 */
export class Pace {
  constructor(period) {
    this.period = period;
    this.next = 0;
    this.made = this.late = this.skipped = this.justSkipped = 0;
    this.latencies = [];
  }

  get missed() { return this.late + this.skipped; }
  get due() { return this.next * this.period; }

  /** Count the answer to the tick that is due. now: ms since the loop began. Returns the ms to wait for the next tick. */
  answered(now) {
    const latency = now - this.due;
    this.latencies.push(latency);
    this.made += 1;
    if (latency > this.period) this.late += 1;
    const following = Math.max(this.next + 1, Math.ceil(now / this.period));
    this.justSkipped = following - this.next - 1;
    this.skipped += this.justSkipped;
    this.next = following;
    return Math.max(0, this.due - now);
  }

  /** Return the median latency in ms, NaN before the first answer. */
  get median() {
    const sorted = [...this.latencies].sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : NaN;
  }
}
