// Hint for sound that is much shorter than its text: pure.

/** Words per second of a very fast speaker. */
const FASTEST = 5;
const FEWEST_WORDS = 4;
const LEAST_SHARE = 0.6;

/** Return a sentence if the sound cannot contain the text, otherwise an empty text. reason: why the model ended. */
export function lengthHint(text, seconds, reason, card) {
  if (reason === "length") return `The sound ended at its length limit. Raise "max output tokens" under "More parameters".`;
  const words = text.split(/\s+/).filter((word) => /[\p{L}\p{N}]/u.test(word)).length;
  const needed = words / FASTEST;
  if (words < FEWEST_WORDS || seconds >= LEAST_SHARE * needed) return "";
  const limit = card.notice ? ` ${card.notice[0].toUpperCase()}${card.notice.slice(1)}. Try one short sentence.` : " Try a shorter text.";
  return `The sound is shorter than the text: ${seconds.toFixed(1)} s for ${words} words, which take at least ${needed.toFixed(0)} s.${limit}`;
}
