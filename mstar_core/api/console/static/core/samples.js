// Sample inputs that the plugin made for the served model.

import { button } from "./dom.js";
import { fromBase64, json } from "./net.js";

const TYPES = { png: "image/png", jpg: "image/jpeg", wav: "audio/wav", mp4: "video/mp4", json: "application/json" };

let known = null;

/** Return the samples as {name, title, text, outputs, params, files}, none if the server has none. */
export function samples() {
  known ??= json("/v1/samples").then(({ data }) => data.map(sampleOf), () => []);
  return known;
}

function sampleOf({ name, title, text, output_modalities: outputs, params, files }) {
  return { name, title, text: text || "", outputs, params, files: files.map(({ name: file, data }) => new File([fromBase64(data)], file, { type: TYPES[file.split(".").at(-1)] || "application/octet-stream" })) };
}

/** Return a button that passes the next fitting sample to `use` at each press. It hides itself if there is none. */
export function sampleButton(label, fits, use) {
  let next = 0;
  const made = button(label, async () => {
    const found = (await samples()).filter(fits);
    await use(found[next++ % found.length]);
  }, { class: "small" });
  samples().then((all) => { made.hidden = !all.some(fits); });
  return made;
}
