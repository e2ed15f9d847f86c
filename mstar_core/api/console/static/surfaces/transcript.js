// Conversation of a chat: its turns, and what can be done with each: copy, edit, answer again, enter results of functions.

import { button, copyButton, download, el } from "../core/dom.js";
import { preview } from "../media/files.js";
import { callCards, isOpen, pretty } from "./chat/calls.js";
import { markdown } from "./markdown.js";

const NEAR_END = 80;

/**
 * Messages and their elements.
 *
 * A message is {role, text, files, images, sound, note, reasoning, calls, results, isJson}: files were sent, the others were
 * received; sound is a WAV blob, results are texts by the ids of calls. onEdit(index, text) and onAgain(index) are called
 * for a user message and for an answer, onResults(index, results) for an answer whose calls got their results.
 */
export class Transcript {
  constructor(name, { onEdit, onAgain, onResults }) {
    this.name = name;
    this.onEdit = onEdit;
    this.onAgain = onAgain;
    this.onResults = onResults;
    this.messages = [];
    this.box = el("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: 0 });
  }

  /** Replace the conversation by these messages. */
  show(messages) {
    this.messages = messages;
    this.box.replaceChildren(...messages.map((message, index) => this.turn(message, index)));
    this.box.scrollTop = this.box.scrollHeight;
  }

  add(message) {
    this.messages.push(message);
    const turn = this.turn(message, this.messages.length - 1);
    this.box.append(turn);
    this.box.scrollTop = this.box.scrollHeight;
    return turn;
  }

  /** Draw a message again. Follows its end if the reader is there. */
  update(index) {
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < NEAR_END;
    this.box.children[index].replaceWith(this.turn(this.messages[index], index));
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Return the element of a message that is being received: words are appended to the returned text element. */
  open(message) {
    const words = el("div", { class: "words plain" });
    const thought = thinking("", "Thinking…");
    const cards = el("div", { class: "stack calls" });
    const turn = el("div", { class: "turn assistant", "aria-busy": "true" }, el("span", { class: "who" }, this.name), thought, words, cards);
    this.messages.push(message);
    this.box.append(turn);
    this.box.scrollTop = this.box.scrollHeight;
    return { turn, words, thought, cards, index: this.messages.length - 1 };
  }

  follow() { if (this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 2 * NEAR_END) this.box.scrollTop = this.box.scrollHeight; }

  turn(message, index) {
    const isUser = message.role === "user";
    const parts = [...(message.files || []).map(preview), ...(message.reasoning ? [thinking(message.reasoning)] : []), wordsOf(message),
      ...(message.calls?.length ? [el("div", { class: "stack calls" }, callCards(message, (results) => this.onResults(index, results)))] : [])];
    for (const image of message.images || []) parts.push(el("img", { src: URL.createObjectURL(image), alt: "Picture by the model" }), download("Download picture", "picture.png", image));
    if (message.sound) parts.push(el("audio", { controls: true, src: URL.createObjectURL(message.sound), "aria-label": "The spoken answer" }));
    if (message.note) parts.push(el("p", { class: "faint" }, message.note));
    const actions = [copyButton(() => message.text), isUser ? button("Edit", () => this.edit(index), { class: "small" }) : button("Regenerate", () => this.onAgain(index), { class: "small" }),
      message.sound ? download("Download WAV", "answer.wav", message.sound) : null];
    return el("div", { class: `turn ${message.role}` }, el("span", { class: "who" }, isUser ? "You" : this.name), parts, el("div", { class: "row actions" }, actions));
  }

  /** Return the last message if its calls wait for results; its first result gets the focus. */
  waiting() {
    const last = this.messages.at(-1);
    if (!last || !isOpen(last)) return null;
    this.box.lastElementChild.querySelector("textarea")?.focus();
    return last;
  }

  /** Turn a user message into a form. Sending it removes the turns after it. */
  edit(index) {
    const message = this.messages[index];
    const text = el("textarea", { rows: 3, "aria-label": "The message" });
    text.value = message.text;
    const leave = () => this.update(index);
    const save = () => this.onEdit(index, text.value.trim());
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); save(); }
    });
    const form = el("div", { class: "turn user stack" }, el("span", { class: "who" }, "You"), text, el("div", { class: "row" }, button("Send again", save, { class: "small primary" }), button("Leave as it was", leave, { class: "small" })));
    this.box.children[index].replaceWith(form);
    text.focus();
  }
}

/** Return the folded thinking of an answer. */
function thinking(text, label = "Thinking") {
  return el("details", { class: "thinking", hidden: !text }, el("summary", {}, label), el("div", { class: "words plain" }, text));
}

/** Return the text of a message: that of a user as it is, JSON with indentation, another answer as Markdown. */
function wordsOf({ role, text, isJson }) {
  if (role === "user") return el("div", { class: "words plain" }, text);
  if (isJson && text) return el("div", { class: "words" }, el("pre", { tabindex: 0, "aria-label": "JSON" }, el("code", {}, pretty(text))));
  return el("div", { class: "words" }, markdown(text));
}
