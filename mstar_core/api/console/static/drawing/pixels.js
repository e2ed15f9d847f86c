// Pixels to canvases and to files.

import { el } from "../core/dom.js";

/** Draw pixels, RGB rows of width × height, on a canvas of that size. */
export function paint(canvas, pixels, width, height = width) {
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) image.data.set([pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2], 255], 4 * i);
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Return pixels, RGB rows of side × side, as a PNG file. */
export function pngOf(pixels, side, name) { return fileOf(paint(el("canvas"), pixels, side), name); }

/** Return the picture of a canvas as a PNG file. */
export async function fileOf(canvas, name) {
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], `${name}.png`, { type: "image/png" });
}
