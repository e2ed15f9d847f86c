// The page: asks what the deployment can do, shows its surfaces, the graph and the last requests.

import { el } from "./core/dom.js";
import { askForKey } from "./core/key.js";
import { json, onKey } from "./core/net.js";
import { showOthers } from "./core/others.js";
import { Session } from "./core/session.js";
import { forget, isKept, keep } from "./core/shelf.js";
import { showGraph } from "./telemetry/graph.js";
import * as speech from "./surfaces/speech.js";
import * as chat from "./surfaces/chat.js";
import * as talk from "./surfaces/talk.js";
import * as images from "./surfaces/images.js";
import * as videos from "./surfaces/videos.js";
import * as robot from "./surfaces/robot.js";
import * as world from "./surfaces/world.js";

const SURFACES = [chat, speech, talk, images, videos, robot, world];
const STATE_MS = 5000;
const byId = (id) => document.getElementById(id);

/** Show the panels of the surfaces as tabs; arrow keys move between them. */
function showTabs(surfaces, card, session) {
  const list = byId("tabs");
  const panels = surfaces.map((surface, index) => el("div", { id: `panel-${index}`, role: "tabpanel", "aria-labelledby": `tab-${index}`, hidden: index > 0 }, surface.mount(card, session)));
  const tabs = surfaces.map((surface, index) => el("button", {
    id: `tab-${index}`, type: "button", role: "tab", "aria-controls": `panel-${index}`, "aria-selected": String(index === 0), tabindex: index ? -1 : 0,
    onclick: () => choose(index), onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); choose((index + step + tabs.length) % tabs.length).focus(); }
    },
  }, surface.title));
  function choose(chosen) {
    tabs.forEach((tab, index) => { tab.setAttribute("aria-selected", String(index === chosen)); tab.tabIndex = index === chosen ? 0 : -1; panels[index].hidden = index !== chosen; });
    return tabs[chosen];
  }
  list.replaceChildren(...tabs);
  list.hidden = tabs.length < 2;
  byId("surfaces").replaceChildren(...panels);
}

/** Connect the controls of the history. */
function watchHistory() {
  byId("keep").checked = isKept();
  byId("keep").addEventListener("change", () => keep(byId("keep").checked));
  byId("forget").addEventListener("click", forget);
}

async function start() {
  onKey(askForKey);
  const [card, ...others] = (await json("/v1/models")).data;
  byId("model").textContent = card.id;
  document.title = `${card.id} · mstarctl`;
  byId("notice").textContent = card.notice || "";
  byId("notice").hidden = !card.notice;
  watchHistory();
  const session = new Session(card, byId("after"), byId("recent"), others.filter(({ parent }) => parent === card.id));
  showTabs(SURFACES.filter((surface) => surface.fits(card)), card, session);
  document.body.dataset.ready = "1";
  showGraph(byId("graph"), byId("live"));
  showOthers(byId("others"));
  watchState();
}

async function watchState() {
  for (;;) {
    const pill = byId("state");
    try {
      const health = await (await fetch("/health")).json();
      const text = health.status === "healthy" ? "ready" : [health.status, health.phase].filter(Boolean).join(": ");
      if (pill.textContent !== text) pill.textContent = text;
      pill.classList.toggle("bad", health.status !== "healthy");
    } catch {
      pill.textContent = "not reachable";
      pill.classList.add("bad");
    }
    await new Promise((resolve) => setTimeout(resolve, STATE_MS));
  }
}

start().catch((problem) => {
  byId("state").textContent = "failed";
  byId("surfaces").replaceChildren(el("p", { class: "error", role: "alert" }, problem.message));
});
