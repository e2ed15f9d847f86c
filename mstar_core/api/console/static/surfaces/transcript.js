// Conversation of a chat: its turns, and what can be done with each: copy, edit, answer again.

import { button, copyButton, download, el } from "../core/dom.js";
import { preview } from "../media/files.js";
import { markdown } from "./markdown.js";

const NEAR_END = 80;

/**
 * Messages and their elements.
 *
 * A message is {role, text, files, images, sound, note}: files were sent, images and sound (a WAV blob) were received.
 * onEdit(index, text) and onAgain(index) are called for a user message and for an answer.
 */
export class Transcript {
  constructor(name, { onEdit, onAgain }) {
    this.name = name;
    this.onEdit = onEdit;
    this.onAgain = onAgain;
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
    const turn = el("div", { class: "turn assistant", "aria-busy": "true" }, el("span", { class: "who" }, this.name), words);
    this.messages.push(message);
    this.box.append(turn);
    this.box.scrollTop = this.box.scrollHeight;
    return { turn, words, index: this.messages.length - 1 };
  }

  follow() { if (this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 2 * NEAR_END) this.box.scrollTop = this.box.scrollHeight; }

  turn(message, index) {
    const isUser = message.role === "user";
    const parts = [...(message.files || []).map(preview), isUser ? el("div", { class: "words plain" }, message.text) : el("div", { class: "words" }, markdown(message.text))];
    for (const image of message.images || []) parts.push(el("img", { src: URL.createObjectURL(image), alt: "Picture by the model" }), download("Download picture", "picture.png", image));
    if (message.sound) parts.push(el("audio", { controls: true, src: URL.createObjectURL(message.sound), "aria-label": "The spoken answer" }));
    if (message.note) parts.push(el("p", { class: "faint" }, message.note));
    const actions = [copyButton(() => message.text), isUser ? button("Edit", () => this.edit(index), { class: "small" }) : button("Regenerate", () => this.onAgain(index), { class: "small" }),
      message.sound ? download("Download WAV", "answer.wav", message.sound) : null];
    return el("div", { class: `turn ${message.role}` }, el("span", { class: "who" }, isUser ? "You" : this.name), parts, el("div", { class: "row actions" }, actions));
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
