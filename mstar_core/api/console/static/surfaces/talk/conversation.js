// Meaning of a session's events for the page: transcripts, playback, and interrupts at the sample that was played.

import { fromBase64 } from "../../core/net.js";
import { Pcm } from "../../media/wav.js";

export const RATE = 24000;
const NOT_ACTIVE = "response_cancel_not_active"; // the answer ended before it was cancelled

/**
 * One conversation, without elements of the page.
 *
 * send(type, fields): to the server. player: `push(samples, id)` and `clear()`. turns: the transcript. shown: `changed()`
 * after each change of the members below, `failed(text)`, `configured(session)` at the begin, `answered(ms)` at the first
 * output after the end of a turn. clock: milliseconds.
 */
export class Conversation {
  constructor({ send, player, turns, shown, clock = () => performance.now() }) {
    this.send = send;
    this.player = player;
    this.turns = turns;
    this.shown = shown;
    this.clock = clock;
    this.isUserSpeaking = false;
    this.response = null;
    this.interrupts = 0;
    this.speeches = new Map(); // item -> samples that came and were played
    this.dropped = new Set(); // responses whose sound is not played any more
    this.asked = null;
  }

  get isPlaying() { return [...this.speeches.values()].some(({ came, played }) => played < came); }

  /** Take an event of the server. */
  handle(event) {
    const { type, item_id: id } = event;
    switch (type) {
      case "session.created": this.shown.configured(event.session); break;
      case "input_audio_buffer.speech_started": this.isUserSpeaking = true; this.turns.note(id, "user", "Listening"); this.interrupt(); break;
      case "input_audio_buffer.speech_stopped": this.isUserSpeaking = false; this.asked = this.clock(); break;
      case "input_audio_buffer.committed": this.turns.note(id, "user", "Spoken"); break;
      case "conversation.item.added": this.added(event.item); break;
      case "conversation.item.input_audio_transcription.delta": this.turns.grow(id, "user", event.delta); break;
      case "conversation.item.input_audio_transcription.completed": this.turns.set(id, "user", event.transcript); break;
      case "conversation.item.input_audio_transcription.failed": this.turns.note(id, "user", `Without a transcript: ${event.error.message}`); break;
      case "response.created": this.begun(event.response.id); break;
      case "response.output_audio.delta": this.hear(event); break;
      case "response.output_audio_transcript.delta":
      case "response.output_text.delta": this.answered(); this.turns.grow(id, "assistant", event.delta); break;
      case "response.output_audio_transcript.done": this.turns.set(id, "assistant", event.transcript); break;
      case "response.output_text.done": this.turns.set(id, "assistant", event.text); break;
      case "response.done": this.done(event.response); break;
      case "conversation.item.truncated": this.truncated(event); break;
      case "conversation.item.retrieved": this.turns.set(event.item.id, "assistant", event.item.content[0]?.transcript ?? ""); break;
      case "error": if (event.error.code !== NOT_ACTIVE) this.shown.failed(event.error.message); break;
    }
    this.shown.changed();
  }

  added({ id, role, content = [] }) {
    if (role !== "user" && role !== "assistant") return;
    const text = content.map((part) => part.text ?? part.transcript ?? "").join("");
    if (text) this.turns.set(id, role, text);
    else this.turns.turn(id, role);
  }

  begun(id) {
    this.response = id;
    for (const [item, { came, played }] of this.speeches) if (played >= came) this.speeches.delete(item);
  }

  hear({ response_id: response, item_id: id, delta }) {
    if (this.dropped.has(response)) return;
    this.answered();
    const speech = this.speeches.get(id) ?? { pcm: new Pcm(), came: 0, played: 0 };
    this.speeches.set(id, speech);
    const samples = speech.pcm.push(fromBase64(delta));
    speech.came += samples.length;
    this.player.push(samples, id);
  }

  answered() {
    if (this.asked === null) return;
    this.shown.answered(this.clock() - this.asked);
    this.asked = null;
  }

  done({ id, status, status_details: details, output }) {
    if (this.response === id) this.response = null;
    const last = output.at(-1);
    if (status === "failed") this.shown.failed(details.error.message || "the answer failed");
    else if (status === "incomplete" && last) this.turns.note(last.id, "assistant", "The answer ended at its length limit.");
  }

  /** Take the report of the player: so many samples of an item were played. */
  played(id, count) {
    const speech = this.speeches.get(id);
    if (speech) speech.played = count;
    this.shown.changed();
  }

  /** Stop the playback at once, and cut the answer where it was played to. */
  async interrupt() {
    if (!this.response && !this.isPlaying) return;
    if (this.response) this.dropped.add(this.response);
    this.interrupts += 1;
    await this.player.clear();
    for (const [id, { came, played }] of this.speeches) {
      this.speeches.delete(id);
      if (played < came) this.send("conversation.item.truncate", { item_id: id, content_index: 0, audio_end_ms: Math.floor((played * 1000) / RATE) });
    }
    this.shown.changed();
  }

  /** The server has cut an answer: read how much of its text is left. */
  truncated({ item_id: id, audio_end_ms: end }) {
    this.turns.note(id, "assistant", `Interrupted after ${(end / 1000).toFixed(1)} s`);
    this.send("conversation.item.retrieve", { item_id: id });
  }

  /** Stop the answer of the model. */
  async stop() {
    if (this.response) this.send("response.cancel", { response_id: this.response });
    await this.interrupt();
  }

  /** Send a written turn. */
  async say(text) {
    await this.stop();
    this.send("conversation.item.create", { item: { type: "message", role: "user", content: [{ type: "input_text", text }] } });
    this.respond();
  }

  /** Send the sound so far as a turn. */
  commit() {
    this.send("input_audio_buffer.commit");
    this.respond();
  }

  respond() {
    this.asked = this.clock();
    this.send("response.create");
  }
}
