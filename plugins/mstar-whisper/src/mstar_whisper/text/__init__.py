"""Text of a transcript: token ids to segments, words and their times. Loads no torch."""
