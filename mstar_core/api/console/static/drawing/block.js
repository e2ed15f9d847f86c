// World of vjepa2_ac:mini: a block on a table that an arm moves, seen from above. Places and moves are in metres.
// It equals plugins/mstar-vjepa2/src/mstar_vjepa2/block.py, the world of its training.

export const REACH = 0.15;
export const HALF = 0.04;
export const VIEW = 0.2;
export const SIDE = 32;
export const FASTEST = 0.05;
export const TOLERANCE = 0.02;
const POSE = 7;
const FAR = 0.1;
const BLOCK = [250, 160, 30];

const clip = (value, low, high) => Math.min(high, Math.max(low, value));

/** Return the place after a move, within reach. */
export function moved(place, move) {
  return place.map((value, i) => clip(value + clip(move[i], -FASTEST, FASTEST), -REACH, REACH));
}

export function distance(place, goal) { return Math.hypot(place[0] - goal[0], place[1] - goal[1]); }

/** Return a place or a move as the model's pose or action of seven values. */
export function pose(place) { return [...place, ...Array(POSE - 2).fill(0)]; }

/** Return a place of the block and a goal that is not near it. chance: from 0 to 1, as Math.random. */
export function draw(chance = Math.random) {
  const place = () => [0, 1].map(() => REACH * (2 * chance() - 1));
  for (;;) {
    const [now, goal] = [place(), place()];
    if (distance(now, goal) > FAR) return { now, goal };
  }
}

/** Return the picture of a place, RGB rows of SIDE × SIDE: an orange block on a table whose colour changes along both axes. */
export function render(place) {
  const middle = Array.from({ length: SIDE }, (_, i) => (((i + 0.5) / SIDE) * 2 - 1) * VIEW);
  const size = (2 * VIEW) / SIDE;
  const cover = (centre, at) => clip(Math.min(centre + HALF, at + size / 2) - Math.max(centre - HALF, at - size / 2), 0, size) / size;
  const pixels = new Uint8ClampedArray(3 * SIDE * SIDE);
  for (let row = 0; row < SIDE; row++) {
    const up = cover(place[1], -middle[row]);
    for (let column = 0; column < SIDE; column++) {
      const share = up * cover(place[0], middle[column]);
      const table = [30 + 90 * ((column + 0.5) / SIDE), 30 + 90 * (1 - (row + 0.5) / SIDE), 70];
      pixels.set(table.map((value, i) => value + share * (BLOCK[i] - value)), 3 * (row * SIDE + column));
    }
  }
  return pixels;
}
