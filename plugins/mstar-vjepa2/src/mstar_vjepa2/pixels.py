"""Numbers of the preprocessing that both sides know. Standard library only."""

from __future__ import annotations

from typing import Final

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
"""Of the training's pixels, red, green, blue, on a scale of 0 to 1."""
