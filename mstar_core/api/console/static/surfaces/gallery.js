// Pictures made so far: a strip of thumbnails, one shown large, two compared.

import { button, download, el } from "../core/dom.js";
import { Shelf, onForget } from "../core/shelf.js";

const SHOWN = 24;

export class Gallery {
  /** onRepeat: called with an item whose prompt and parameters the form shall take over. */
  constructor(card, onRepeat) {
    this.onRepeat = onRepeat;
    this.items = [];
    this.urls = new Map();
    this.shown = null;
    this.other = null;
    this.shelf = new Shelf(card.id, "images", SHOWN);
    this.large = el("div", { class: "stack" });
    this.strip = el("div", { class: "strip" });
    this.box = el("section", { class: "stack", "aria-label": "Pictures so far", hidden: true }, el("h3", {}, "Pictures so far"), el("p", { class: "faint" }, "Choose a picture to see it, and a second one to compare the two."), this.strip, this.large);
    onForget(() => { this.items = []; this.choose(null); });
    this.shelf.all().then((kept) => { this.items.push(...kept); this.draw(); });
  }

  add(item) {
    this.items.unshift(item);
    this.items.length = Math.min(this.items.length, SHOWN);
    this.shelf.put(item);
    this.choose(null);
  }

  /** Show an item; a second one is compared with it; a shown one is put away. */
  choose(item) {
    if (item === null) this.shown = this.other = null;
    else if (item === this.shown) [this.shown, this.other] = [this.other, null];
    else if (item === this.other) this.other = null;
    else if (this.shown) this.other = item;
    else this.shown = item;
    this.draw();
  }

  remove(item) {
    this.items = this.items.filter((each) => each !== item);
    this.shelf.remove(item.id);
    this.choose(null);
  }

  url(item) {
    if (!this.urls.has(item.id)) this.urls.set(item.id, URL.createObjectURL(item.picture));
    return this.urls.get(item.id);
  }

  draw() {
    this.box.hidden = !this.items.length;
    this.strip.replaceChildren(...this.items.map((item) => el("button", { type: "button", class: "thumb", "aria-pressed": String([this.shown, this.other].includes(item)), title: titleOf(item), onclick: () => this.choose(item) },
      el("img", { src: this.url(item), alt: titleOf(item) }))));
    const chosen = [this.shown, this.other].filter(Boolean);
    this.large.replaceChildren(...(chosen.length === 2 ? [this.compared(...chosen)] : []), ...chosen.map((item) => this.facts(item, chosen.length === 1)));
  }

  facts(item, isLarge) {
    return el("figure", { class: "stack" }, isLarge ? el("img", { class: "picture", src: this.url(item), alt: item.prompt }) : null, el("figcaption", {}, titleOf(item)),
      el("div", { class: "row" }, download("Download PNG", "image.png", item.picture), button("Use prompt and seed", () => this.onRepeat(item), { class: "small" }), button("Remove", () => this.remove(item), { class: "small" })));
  }

  /** Return two pictures on top of each other; the slider moves the border between them. */
  compared(left, right) {
    const over = el("img", { src: this.url(right), alt: `Right: ${right.prompt}` });
    const slide = () => { over.style.clipPath = `inset(0 0 0 ${slider.value}%)`; };
    const slider = el("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "Border between the two pictures", oninput: slide });
    slide();
    return el("div", { class: "stack" }, el("div", { class: "compare" }, el("img", { src: this.url(left), alt: `Left: ${left.prompt}` }), over), slider);
  }
}

function titleOf({ prompt, width, height, seed }) {
  return [prompt, width ? `${width} × ${height}` : "", seed == null ? "" : `seed ${seed}`].filter(Boolean).join(" · ");
}
