// The page: asks what the deployment can do, shows its surfaces, the graph and the last requests.

import { el } from "./dom.js";
import { askForKey } from "./key.js";
import { json, onKey } from "./net.js";
import { Session } from "./session.js";
import { watchGraph } from "./graph.js";
import * as speech from "./speech.js";
import * as chat from "./chat.js";
import * as images from "./images.js";
import * as robot from "./robot.js";
import * as world from "./world.js";

const SURFACES = [chat, speech, images, robot, world];
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

async function start() {
  onKey(askForKey);
  const card = (await json("/v1/models")).data[0];
  byId("model").textContent = card.id;
  document.title = `${card.id} · mstarctl`;
  byId("notice").textContent = card.notice || "";
  byId("notice").hidden = !card.notice;
  const session = new Session(card, byId("after"), byId("recent"));
  showTabs(SURFACES.filter((surface) => surface.fits(card)), card, session);
  document.body.dataset.ready = "1";
  watchGraph(byId("graph"), byId("live"));
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
    await new Promise((resolve) => setTimeout(resolve, 5000));
  }
}

start().catch((problem) => {
  byId("state").textContent = "failed";
  byId("surfaces").replaceChildren(el("p", { class: "error", role: "alert" }, problem.message));
});
