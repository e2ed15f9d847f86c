// The clip of a world model: its file or frames, as many as the model takes.

import { el, field } from "../../core/dom.js";
import { Failure } from "../../core/net.js";
import { Media, kindOf } from "../../media/files.js";
import { framesOf, sampleFrames } from "../../media/samples.js";

const [FEW, MANY] = [4, 16];

/** Uploads of a request that the api accepts by default, less one for a goal. */
const MOST_FILES = 31;

/**
 * A clip and its number of frames.
 *
 * A model with the parameter num_frames samples a clip itself. For others, each frame is one time step, so the page
 * takes that many frames out of a clip and sends them as pictures.
 */
export class Clip {
  constructor(card, { most = Infinity, label = "A clip, or its frames as images" } = {}) {
    this.samplesItself = Boolean(card.parameters.properties.num_frames);
    this.most = Math.min(most, card.max_frames ?? card.parameters.properties.num_frames?.maximum ?? MOST_FILES);
    const usual = Math.min(this.most, this.samplesItself ? MANY : FEW);
    this.frames = el("input", { type: "number", min: 1, max: this.most, value: usual, required: true });
    const sample = el("button", { type: "button", class: "small", onclick: async () => {
      sample.disabled = true;
      this.media.clear();
      this.media.add(...await sampleFrames(Math.min(this.count, MOST_FILES), { world: card.world }));
      sample.disabled = false;
    } }, most === 1 ? "Sample frame" : "Sample clip");
    this.media = new Media({ kinds: ["video", "image"], label, extra: [sample] });
    this.field = field("Frames", this.frames, `at most ${this.most}`);
  }

  get count() { return Math.max(1, Math.min(this.most, Math.round(Number(this.frames.value)) || 1)); }

  /** Return the parameters of a request. */
  given() { return this.samplesItself ? { num_frames: Math.min(this.count, this.isClip ? this.count : this.media.files.length) } : {}; }
  get isClip() { return this.media.files.length === 1 && kindOf(this.media.files[0]) === "video"; }

  /** Return the files to send. Throws Failure without a clip, or if the browser cannot decode it. */
  async files() {
    const { files } = this.media;
    if (!files.length) throw new Failure("Add a clip, or take the sample.");
    if (!this.isClip) {
      if (files.some((file) => kindOf(file) === "video")) throw new Failure("Add one clip, or images, but not both.");
      return files.slice(0, this.count);
    }
    return this.samplesItself ? files : framesOf(files[0], this.count);
  }
}
