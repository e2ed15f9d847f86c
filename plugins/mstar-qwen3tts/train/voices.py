"""Voices of the miniature."""

from __future__ import annotations

from typing import Final

from scripts.training.espeak import Voice

SPEAKERS: Final = {"vivian": Voice(pitch=75), "ryan": Voice(pitch=30), "aiden": Voice(pitch=50, words_per_minute=140)}
"""Voices by their official names."""
