// Talk: a conversation by microphone and by written lines, with speech that can be interrupted.

import { button, el, field, figures, milliseconds } from "../core/dom.js";
import { toBase64 } from "../core/net.js";
import { Capture } from "../media/capture.js";
import { Player } from "../media/player.js";
import { Scope } from "../media/scope.js";
import { Connection } from "./talk/connection.js";
import { Conversation, RATE } from "./talk/conversation.js";
import { Settings } from "./talk/settings.js";
import { Turns } from "./talk/turns.js";

export const title = "Talk";
export const fits = (card) => card.endpoints.includes("/v1/realtime") && (hears(card) || speaks(card));

/** A model that only speaks takes text alone. */
const hears = (card) => card.input_modalities.includes("audio") && card.endpoints.includes("/v1/chat/completions");
const speaks = (card) => card.output_modalities.includes("audio");
const LEAST_MS = 100; // a shorter turn is refused by the server

export function mount(card) {
  const turns = new Turns(card.id);
  const settings = new Settings(card, { hears: hears(card), onChange: () => { connection?.send("session.update", { session: settings.session() }); draw(); } });
  const scopes = { user: hears(card) ? new Scope("Waveform of the microphone", "--c1") : null, model: speaks(card) ? new Scope("Waveform of the model's speech", "--c0") : null };
  const shown = figures(["First output", "Interrupts"]);
  const status = el("span", { class: "pill", role: "status" }, "not connected");
  const error = el("p", { class: "error", role: "alert" });
  const line = el("input", { type: "text", autocomplete: "off", placeholder: "A written turn" });
  const microphone = button("Microphone", openMicrophone, { class: "primary" });
  const mute = button("Mute", () => setMuted(mute.getAttribute("aria-pressed") !== "true"), { "aria-pressed": "false" });
  const hold = button("Hold to talk", ({ detail }) => { if (!detail) (isHeld ? release : press)(); }, { "aria-pressed": "false",
    onpointerdown: ({ pointerId }) => { hold.setPointerCapture(pointerId); press(); }, onpointerup: () => release(), onpointercancel: () => release() });
  const stop = button("Stop the answer", () => conversation?.stop());
  const end = button("End", () => { finish(); (microphone.hidden ? line : microphone).focus(); });
  const send = el("button", { type: "submit" }, "Send");
  let connection = null, conversation = null, player = null, capture = null, opening = null;
  let isLost = false, isHeld = false, heldMs = 0, isReleased = false;

  /** Show which controls can be used, and who speaks. */
  function draw() {
    const isOn = connection !== null;
    end.disabled = !isOn;
    stop.disabled = !isOn || !(conversation.response || conversation.isPlaying);
    send.disabled = isLost;
    microphone.hidden = !hears(card) || capture !== null;
    mute.hidden = capture === null;
    hold.hidden = capture === null || !settings.isHeld;
    const text = stateText();
    if (status.textContent !== text) status.textContent = text;
    shown.set("Interrupts", String(conversation?.interrupts ?? 0));
  }

  function stateText() {
    if (!connection) return "not connected";
    if (isLost) return "connection lost, connecting again";
    if (conversation.isUserSpeaking || isHeld) return "you speak";
    if (conversation.isPlaying) return `${card.id} speaks`;
    if (conversation.response) return "answering";
    return capture && !settings.isHeld ? "listening" : "ready";
  }

  /** Begin a session, unless there is one. Runs in a click. Throws Failure. */
  function begin() {
    error.textContent = "";
    return opening ??= connect();
  }

  async function connect() {
    turns.clear();
    player = new Player((count, _isOver, id) => { section.dataset.played = count; conversation.played(id, count); });
    connection = new Connection({ model: card.id, onEvent: (event) => conversation.handle(event),
      onState: (state) => { isLost = state === "lost"; draw(); }, onEnd: (why) => { fail(`The session has ended: ${why}`); finish(); } });
    conversation = new Conversation({ send: (...event) => connection?.send(...event), player, turns, shown: {
      changed: draw, failed: fail, answered: (ms) => shown.set("First output", milliseconds(ms)),
      configured: (session) => { settings.follow(session); connection.send("session.update", { session: settings.session() }); } } });
    try {
      if (speaks(card)) { await player.open(RATE); scopes.model.watch(player.node); }
      await connection.open();
    } catch (problem) {
      finish();
      throw problem;
    }
  }

  async function openMicrophone() {
    microphone.disabled = true;
    try {
      await begin();
      capture = await Capture.open(RATE, hear, () => { fail("The microphone is gone."); closeMicrophone(); });
      if (connection) scopes.user.watch(capture.source);
      else closeMicrophone(); // the session ended while the browser asked for permission
    } catch (problem) {
      fail(problem.name === "NotAllowedError" ? "The microphone is not allowed. Allow it in the browser's settings of this page." : problem.message);
    } finally {
      microphone.disabled = false;
      draw();
      if (capture) (settings.isHeld ? hold : mute).focus();
    }
  }

  function closeMicrophone() {
    capture?.close();
    scopes.user?.stop();
    capture = null;
    isHeld = isReleased = false;
    setMuted(false);
  }

  function setMuted(isMuted) {
    capture?.mute(isMuted);
    mute.setAttribute("aria-pressed", String(isMuted));
    draw();
  }

  /** Take sound of the microphone. With the button, only what is spoken while it is held is sent. */
  function hear(piece) {
    if (settings.isHeld && !isHeld && !isReleased) return;
    connection?.send("input_audio_buffer.append", { audio: toBase64(new Uint8Array(piece.buffer)) });
    heldMs += (piece.length * 1000) / RATE;
    if (!isReleased) return;
    isReleased = false;
    if (heldMs >= LEAST_MS) { conversation?.commit(); return; }
    connection?.send("input_audio_buffer.clear");
    fail("Hold the button while you speak.");
  }

  function press() {
    if (isHeld || !capture) return;
    error.textContent = "";
    isHeld = true;
    isReleased = false;
    heldMs = 0;
    hold.setAttribute("aria-pressed", "true");
    conversation.stop();
    draw();
  }

  /** End the turn behind the piece of sound that is being recorded. */
  function release() {
    if (!isHeld) return;
    isHeld = false;
    isReleased = true;
    hold.setAttribute("aria-pressed", "false");
    draw();
  }

  async function submit(event) {
    event.preventDefault();
    const text = line.value.trim();
    if (!text || send.disabled) return;
    line.value = "";
    try {
      await begin();
      await conversation.say(text);
    } catch (problem) {
      line.value = text;
      fail(problem.message);
    }
  }

  function fail(text) { error.textContent = text; }

  function finish() {
    connection?.close();
    player?.stop();
    scopes.model?.stop();
    connection = conversation = player = opening = null;
    isLost = false;
    closeMicrophone();
  }

  window.addEventListener("pagehide", finish);
  const stopByKey = (event) => { if (event.key === "Escape" && !stop.disabled) conversation.stop(); };
  const waves = Object.entries(scopes).filter(([, scope]) => scope).map(([name, scope]) => el("figure", {}, scope.canvas, el("figcaption", {}, name === "user" ? "You" : card.id)));
  const section = el("form", { class: "card stack", onsubmit: submit, onkeydown: stopByKey }, el("h2", {}, hears(card) ? "Talk" : "Write, and hear it"),
    el("div", { class: "row" }, microphone, hold, mute, stop, end, status), settings.hint, el("div", { class: "scopes" }, waves), turns.box,
    el("div", { class: "composer" }, field(hears(card) ? "Message" : "Text", line), send), error, settings.fields, settings.folds, shown.list);
  draw();
  return section;
}
