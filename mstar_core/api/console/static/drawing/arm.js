// World of pi05:mini: a planar arm of two joints among coloured targets, seen by three cameras.
// It equals plugins/mstar-pi05/src/mstar_pi05/arm.py, the world of its training. Lengths: the stretched arm reaches 1.

export const COLOURS = { red: [230, 40, 40], green: [40, 200, 60], blue: [50, 80, 240] };
export const NAMES = Object.keys(COLOURS);
export const CAMERAS = ["above", "tip", "turned"];
export const SIDE = 32;
export const TOLERANCE = 0.08;
export const RADIUS = 0.15;
const LINK = 0.5;
const LOW = [-1.5, 0.3];
const HIGH = [1.5, 2.3];
const FASTEST = 0.12;
const APART = 0.35;
const BACKGROUND = [24, 24, 28];
const PARTS = { upper: [0.05, [150, 150, 150]], lower: [0.04, [215, 215, 215]], tip: [0.06, [255, 220, 0]] };

const clip = (value, low, high) => Math.min(high, Math.max(low, value));

/** Return elbow and tip of two joint values. */
export function points([first, bend]) {
  const elbow = [LINK * Math.cos(first), LINK * Math.sin(first)];
  return [elbow, [elbow[0] + LINK * Math.cos(first + bend), elbow[1] + LINK * Math.sin(first + bend)]];
}

/** Return the joints after one movement, within the limits of speed and place. */
export function moved(joints, movement) {
  return joints.map((value, i) => clip(value + clip(movement[i], -FASTEST, FASTEST), LOW[i], HIGH[i]));
}

/** Return the distance between the tip and a target. */
export function distance(joints, target) {
  const [x, y] = points(joints)[1];
  return Math.hypot(x - target[0], y - target[1]);
}

/** Return a scene whose targets can be reached and whose tip is at none of them. chance: from 0 to 1, as Math.random. */
export function draw(chance = Math.random) {
  const between = (low, high) => low + (high - low) * chance();
  for (;;) {
    const joints = LOW.map((low, i) => between(low, HIGH[i]));
    const targets = NAMES.map(() => points(LOW.map((low, i) => between(low + 0.1, HIGH[i] - 0.1)))[1]);
    const gaps = targets.map((target, i) => Math.hypot(...target.map((value, axis) => value - targets[(i + 1) % targets.length][axis])));
    if (Math.min(...gaps) > APART && targets.every((target) => distance(joints, target) > APART)) return { joints, targets };
  }
}

/** Return the three cameras of a scene, each RGB rows of SIDE × SIDE. */
export function render({ joints, targets }) {
  const [elbow, tip] = points(joints);
  const middle = Array.from({ length: SIDE }, (_, i) => ((i + 0.5) / SIDE) * 2 - 1);
  const views = [[1.1, (across, down) => [1.1 * across, 1.1 * down]], [0.5, (across, down) => [0.5 * across + tip[0], 0.5 * down + tip[1]]], [1.1, (across, down) => [1.1 * down, -1.1 * across]]];
  return views.map(([half, place]) => {
    const pixels = new Uint8ClampedArray(3 * SIDE * SIDE);
    const pixel = (2 * half) / SIDE;
    for (let row = 0; row < SIDE; row++) {
      for (let column = 0; column < SIDE; column++) pixels.set(colourAt(place(middle[column], -middle[row]), elbow, tip, targets, pixel), 3 * (row * SIDE + column));
    }
    return pixels;
  });
}

function colourAt(at, elbow, tip, targets, pixel) {
  let colour = BACKGROUND;
  const add = (gap, over) => {
    const cover = clip(0.5 - gap / pixel, 0, 1);
    colour = colour.map((value, i) => value + cover * (over[i] - value));
  };
  targets.forEach((target, i) => add(far(at, target, target) - RADIUS, COLOURS[NAMES[i]]));
  for (const [name, start, end] of [["upper", [0, 0], elbow], ["lower", elbow, tip], ["tip", tip, tip]]) add(far(at, start, end) - PARTS[name][0], PARTS[name][1]);
  return colour;
}

/** Return the distance of a point from a segment. */
function far(at, start, end) {
  const along = [end[0] - start[0], end[1] - start[1]];
  const from = [at[0] - start[0], at[1] - start[1]];
  const share = clip((from[0] * along[0] + from[1] * along[1]) / Math.max(along[0] ** 2 + along[1] ** 2, 1e-12), 0, 1);
  return Math.hypot(from[0] - share * along[0], from[1] - share * along[1]);
}
