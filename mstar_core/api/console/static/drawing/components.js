// Features of a clip as colours: their first three principal components.

/** Project rows on their first three principal components, as bytes of RGB. rows: count × width floats. */
export function colours(rows, width) {
  const count = rows.length / width;
  const mean = new Float64Array(width);
  for (let i = 0; i < rows.length; i++) mean[i % width] += rows[i] / count;
  const axes = [];
  for (let axis = 0; axis < 3; axis++) axes.push(principal(rows, width, mean, axes, axis));
  const made = new Uint8ClampedArray(count * 3);
  axes.forEach((axis, channel) => {
    const scores = new Float64Array(count);
    for (let row = 0; row < count; row++) {
      let sum = 0;
      for (let i = 0; i < width; i++) sum += (rows[row * width + i] - mean[i]) * axis[i];
      scores[row] = sum;
    }
    const sorted = Float64Array.from(scores).sort();
    const low = sorted[Math.floor(0.02 * (count - 1))], high = sorted[Math.ceil(0.98 * (count - 1))];
    scores.forEach((score, row) => { made[row * 3 + channel] = (255 * (score - low)) / (high - low || 1); });
  });
  return made;
}

const ROUNDS = 12;

/** Power iteration for the next axis, orthogonal to those before. */
function principal(rows, width, mean, before, seed) {
  let axis = Float64Array.from({ length: width }, (_, i) => Math.sin(1 + i * (seed + 1.7)));
  const count = rows.length / width;
  const stride = Math.max(1, Math.floor(count / 1500)); // 1500 rows fix three directions well enough
  for (let round = 0; round < ROUNDS; round++) {
    const next = new Float64Array(width);
    for (let row = 0; row < count; row += stride) {
      let score = 0;
      for (let i = 0; i < width; i++) score += (rows[row * width + i] - mean[i]) * axis[i];
      for (let i = 0; i < width; i++) next[i] += score * (rows[row * width + i] - mean[i]);
    }
    for (const other of before) {
      const share = next.reduce((sum, value, i) => sum + value * other[i], 0);
      for (let i = 0; i < width; i++) next[i] -= share * other[i];
    }
    const length = Math.hypot(...next) || 1;
    axis = next.map((value) => value / length);
  }
  return axis;
}
