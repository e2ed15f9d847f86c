"""Voices of the spoken answers."""

from __future__ import annotations

from typing import Final

from scripts.training.espeak import Voice

SPEAKERS: Final = {"ethan": Voice(pitch=30), "chelsie": Voice(pitch=75), "aiden": Voice(pitch=50, words_per_minute=140)}
"""Voices by their official names."""
