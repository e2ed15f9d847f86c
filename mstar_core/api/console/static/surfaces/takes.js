// Sounds made so far: each with a player, its text and seed, to hear, save and repeat.

import { button, download, el } from "../core/dom.js";
import { Shelf, onForget } from "../core/shelf.js";

const SHOWN = 12;

export class Takes {
  /** onRepeat: called with a take whose text, voice and seed the form shall take over. */
  constructor(card, onRepeat) {
    this.onRepeat = onRepeat;
    this.items = [];
    this.rows = new Map();
    this.shelf = new Shelf(card.id, "speech", SHOWN);
    this.list = el("ol", { class: "takes" });
    this.box = el("section", { class: "stack", "aria-label": "Sounds so far", hidden: true }, el("h3", {}, "Sounds so far"), this.list);
    onForget(() => { this.items = []; this.draw(); });
    this.shelf.all().then((kept) => { this.items.push(...kept); this.draw(); });
  }

  add(take) {
    this.items.unshift(take);
    this.items.length = Math.min(this.items.length, SHOWN);
    this.shelf.put(take);
    this.draw();
  }

  /** Pause all players. */
  stop() { for (const player of this.list.querySelectorAll("audio")) player.pause(); }

  remove(take) {
    this.items = this.items.filter((each) => each !== take);
    this.shelf.remove(take.id);
    this.draw();
  }

  draw() {
    this.box.hidden = !this.items.length;
    this.list.replaceChildren(...this.items.map((take) => this.rows.get(take.id) || this.row(take)));
  }

  row(take) {
    const facts = [take.voice, `${take.seconds.toFixed(2)} s`, take.seed == null ? "" : `seed ${take.seed}`, take.isWhole ? "" : "stopped"].filter(Boolean).join(" · ");
    const made = el("li", { class: "take" }, el("audio", { controls: true, preload: "metadata", src: URL.createObjectURL(take.sound), "aria-label": `Sound: ${take.text.slice(0, 60)}` }),
      el("p", { class: "said", title: take.text }, take.text), el("span", { class: "faint" }, facts),
      el("div", { class: "row" }, download("Download WAV", "speech.wav", take.sound), button("Use text and seed", () => this.onRepeat(take), { class: "small" }), button("Remove", () => this.remove(take), { class: "small" })));
    this.rows.set(take.id, made);
    return made;
  }
}
