// Pictures and clips that the page draws, and frames that it takes out of a clip.

import { el } from "../core/dom.js";
import { Failure } from "../core/net.js";
import * as block from "../drawing/block.js";
import { fileOf, pngOf } from "../drawing/pixels.js";

const COLOURS = [["#0f766e", "#fbbf24"], ["#4f46e5", "#f472b6"], ["#b45309", "#38bdf8"]];

/** Draw a scene: a ball over a horizon. phase: 0 to 1 moves the ball. */
function scene(context, size, index, phase) {
  const [low, high] = COLOURS[index % COLOURS.length];
  const sky = context.createLinearGradient(0, 0, 0, size);
  sky.addColorStop(0, high);
  sky.addColorStop(1, "#f1f5f9");
  context.fillStyle = sky;
  context.fillRect(0, 0, size, size);
  context.fillStyle = low;
  context.fillRect(0, size * 0.65, size, size);
  context.fillStyle = "#dc2626";
  context.beginPath();
  context.arc(size * (0.15 + 0.7 * phase), size * (0.55 - 0.3 * Math.sin(Math.PI * phase)), size * 0.09, 0, 7);
  context.fill();
}

/** Return a sample picture of a ball over a horizon. */
export async function samplePicture(name, { index = 0, size = 224, phase = 0.4 } = {}) {
  const canvas = el("canvas", { width: size, height: size });
  scene(canvas.getContext("2d"), size, index, phase);
  return fileOf(canvas, name);
}

/** Return the frames of a sample clip as pictures: a block that moves on its table, or a ball in flight. */
export async function sampleFrames(count, { world = "", size = 256 } = {}) {
  const phases = Array.from({ length: count }, (_, i) => i / Math.max(1, count - 1));
  if (world === "block") return Promise.all(phases.map((phase, i) => pngOf(block.render([block.REACH * (1.6 * phase - 0.8), 0.6 * block.REACH * Math.sin(3 * phase)]), block.SIDE, `frame-${i + 1}`)));
  return Promise.all(phases.map((phase, i) => samplePicture(`frame-${i + 1}`, { size, phase })));
}

const FRAME_PIXELS = 512;

/** Return evenly spread frames of a clip as pictures. Throws Failure if the browser cannot decode the clip. */
export async function framesOf(file, count) {
  const video = el("video", { muted: true, preload: "auto" });
  video.src = URL.createObjectURL(file);
  try {
    await heard(video, "loadeddata");
    const length = await lengthOf(video);
    const scale = Math.min(1, FRAME_PIXELS / Math.max(video.videoWidth, video.videoHeight));
    const canvas = el("canvas", { width: Math.round(video.videoWidth * scale), height: Math.round(video.videoHeight * scale) });
    const found = [];
    for (let i = 0; i < count; i++) {
      video.currentTime = (length * (i + 0.5)) / count;
      await heard(video, "seeked");
      canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
      found.push(await fileOf(canvas, `frame-${i + 1}`));
    }
    return found;
  } finally {
    URL.revokeObjectURL(video.src);
  }
}

/** Return the length in seconds. A recording of this browser knows it only after a jump to its end. */
async function lengthOf(video) {
  if (Number.isFinite(video.duration)) return video.duration;
  video.currentTime = 1e9;
  await heard(video, "seeked");
  return video.duration;
}

function heard(video, name) {
  return new Promise((resolve, reject) => {
    video.addEventListener(name, resolve, { once: true });
    video.addEventListener("error", () => reject(new Failure("this browser cannot decode the clip")), { once: true });
  });
}
