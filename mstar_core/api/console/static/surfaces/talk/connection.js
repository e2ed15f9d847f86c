// Connection to /v1/realtime: keys, the events of a session, and its resumption after a lost connection.

import { Failure, call, checked, hasKey, json } from "../../core/net.js";

const PATH = "/v1/realtime";
const KEPT_MS = 60000; // the server keeps a session without a connection for this time
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 4000;
const NORMAL = 1000;
const UPGRADE_REQUIRED = 426;
const TOO_MANY = 429;

/** A refusal that no further attempt changes. */
class Final extends Failure {}

/** One session. onEvent(event); onState: "open", "lost"; onEnd(why): once, if the session ends by itself. */
export class Connection {
  constructor({ model, onEvent, onState, onEnd }) {
    this.model = model;
    this.onEvent = onEvent;
    this.onState = onState;
    this.onEnd = onEnd;
    this.id = "";
    this.last = "0";
    this.isEnded = false;
    this.socket = null;
  }

  get isOpen() { return this.socket?.readyState === WebSocket.OPEN; }

  /** Connect and begin a session, or resume it. Throws Failure. */
  async open() {
    const query = new URLSearchParams(this.id ? { resume: this.id, after: this.last } : { model: this.model });
    const protocols = ["realtime", ...(hasKey() ? [`openai-insecure-api-key.${await newSecret()}`] : [])];
    const socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${PATH}?${query}`, protocols);
    this.socket = socket;
    await new Promise((resolve, reject) => {
      socket.onopen = () => { if (this.id) resolve(); };
      socket.onmessage = ({ data }) => { this.take(JSON.parse(data)); resolve(); }; // the first event of a new session describes it
      socket.onclose = () => reasonOf(query).then(reject, reject);
    });
    socket.onclose = ({ code, reason }) => this.closed(code, reason);
    if (this.isEnded) { this.close(); return; }
    this.onState("open");
  }

  take(event) {
    this.last = event.event_id;
    if (event.type === "session.created") this.id = event.session.id;
    this.onEvent(event);
  }

  /** Send an event. Without a connection it is dropped. */
  send(type, fields = {}) { if (this.isOpen) this.socket.send(JSON.stringify({ type, ...fields })); }

  /** End the session. */
  close() {
    this.isEnded = true;
    this.socket?.close(NORMAL);
  }

  closed(code, reason) {
    if (this.isEnded) return;
    if (code === NORMAL) this.end(reason || "the server ended the session");
    else this.resume();
  }

  end(why) {
    this.isEnded = true;
    this.onEnd(why);
  }

  async resume() {
    this.onState("lost");
    const last = performance.now() + KEPT_MS;
    for (let pause = FIRST_PAUSE_MS; !this.isEnded; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      if (this.isEnded) return;
      try {
        await this.open();
        return;
      } catch (problem) {
        if (problem instanceof Final || performance.now() > last) this.end(problem.message);
      }
    }
  }
}

/** Return a key for one handshake, because browsers cannot send headers with it. */
async function newSecret() {
  const options = { method: "POST", body: JSON.stringify({ expires_after: { anchor: "created_at", seconds: 60 } }), headers: { "Content-Type": "application/json" } };
  return (await json(`${PATH}/client_secrets`, options)).value;
}

/** Return why the server refused a handshake. Browsers do not say, but the same request without an upgrade gets the text. */
async function reasonOf(query) {
  const answer = await call(`${PATH}?${query}`).catch(() => null);
  if (!answer) return new Failure("the server cannot be reached");
  if (answer.status === UPGRADE_REQUIRED) return new Failure("the connection was refused");
  try {
    await checked(answer);
  } catch (problem) {
    return answer.status < 500 && answer.status !== TOO_MANY ? new Final(problem.message, problem.code) : problem;
  }
  return new Failure("the connection was refused");
}
