// Transcript of a spoken conversation: one element for each item, whose text grows while it is spoken.

import { el } from "../../core/dom.js";

const NEAR_END = 160;

export class Turns {
  constructor(name) {
    this.name = name;
    this.turns = new Map();
    this.box = el("div", { class: "talk spoken", role: "log", "aria-label": "Transcript", tabindex: 0 });
  }

  /** Return the element of an item, created at the end if it is new. role: user or assistant. */
  turn(id, role) {
    const known = this.turns.get(id);
    if (known) return known;
    const words = el("div", { class: "words plain" });
    const note = el("p", { class: "faint" });
    const box = el("div", { class: `turn ${role}` }, el("span", { class: "who" }, role === "user" ? "You" : this.name), words, note);
    const made = { box, words, note };
    this.turns.set(id, made);
    this.box.append(box);
    this.follow();
    return made;
  }

  /** Append to the text of an item; screen readers wait for its end. */
  grow(id, role, text) {
    const { box, words } = this.turn(id, role);
    box.setAttribute("aria-busy", "true");
    words.append(text);
    this.follow();
  }

  /** Set the whole text of an item. */
  set(id, role, text) {
    const { box, words } = this.turn(id, role);
    box.removeAttribute("aria-busy");
    words.textContent = text;
    this.follow();
  }

  /** Set the line below an item, such as where it was interrupted. */
  note(id, role, text) {
    this.turn(id, role).note.textContent = text;
    this.follow();
  }

  follow() { if (this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < NEAR_END) this.box.scrollTop = this.box.scrollHeight; }

  clear() {
    this.turns.clear();
    this.box.replaceChildren();
  }
}
