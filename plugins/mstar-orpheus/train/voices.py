"""Voices of the miniature: the speakers of espeak-ng that it learns from."""

from __future__ import annotations

from typing import Final

from scripts.training.espeak import Voice

RATE: Final = 24_000
"""Samples per second."""

LOW: Final = Voice(words_per_minute=155, pitch=42)
HIGH: Final = Voice(words_per_minute=155, pitch=62)
VOICES: Final = {"tara": HIGH, "leah": HIGH, "jess": HIGH, "mia": HIGH, "zoe": HIGH, "leo": LOW, "dan": LOW, "zac": LOW}
"""The official voice names: one speaker in two registers."""
