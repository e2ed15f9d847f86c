// Links to the pages of the other deployments of this host.

import { el } from "./dom.js";
import { json } from "./net.js";

const EVERYWHERE = ["0.0.0.0", "::", "127.0.0.1", "::1", "localhost"];

/** Return the address of a deployment's page, as seen from this page. */
export function addressOf({ host, port, is_tls: isTls, path }, from = location) {
  if (path) return path; // behind a gateway
  const name = EVERYWHERE.includes(host) ? from.hostname : host.includes(":") ? `[${host}]` : host;
  return `${isTls ? "https:" : "http:"}${"//"}${name}:${port}/`;
}

/** Fill the menu beside the model's name. It stays hidden if there is nothing to switch to. */
export async function showOthers(menu) {
  let found = [];
  try { found = (await json("/console/deployments")).deployments; } catch { /* not shown to this address */ }
  menu.hidden = !found.length;
  menu.querySelector("ul").replaceChildren(...found.map((each) => el("li", {}, el("a", { href: addressOf(each) }, each.name, el("span", { class: "faint" }, ` ${each.model}`)))));
}
