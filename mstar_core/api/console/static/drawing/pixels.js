// Pictures of simulated worlds: pixels to canvases and to files.

import { el } from "../core/dom.js";

/** Draw pixels, RGB rows of side × side, on a canvas of that size. */
export function paint(canvas, pixels, side) {
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  for (let i = 0; i < side * side; i++) image.data.set([pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2], 255], 4 * i);
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Return pixels as a PNG file. */
export async function pngOf(pixels, side, name) {
  const canvas = paint(el("canvas"), pixels, side);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], `${name}.png`, { type: "image/png" });
}
