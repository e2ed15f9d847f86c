"""Values of a request that names none: the official ones of its kind of checkpoint, or those of a miniature's file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from mstar_wan22.checkpoint.config import INDEX, Sizes

KEY: Final = "request_defaults"
"""Key of `model_index.json` with other values, which official files do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Defaults: those of TI2V-5B. width, height: pixels, before they are rounded down to what the model takes.

    seconds: length. steps: of denoising. scales: guidance of the first and of the second expert. shift: of the flow.
    """

    width: int = 1280
    height: int = 720
    seconds: float = 5.0
    fps: int = 24
    steps: int = 50
    scales: tuple[float, float] = (5.0, 5.0)
    shift: float = 5.0


def read_usual(folder: Path, sizes: Sizes) -> Usual:
    """Return the defaults of a checkpoint, whose sizes are known to be readable."""
    found = Usual(shift=sizes.flow_shift if sizes.expands else 5.0)
    if sizes.has_experts:
        found = Usual(fps=16, steps=40, scales=(3.5, 3.5) if sizes.takes_image else (4.0, 3.0))
        found = found if sizes.takes_image else replace(found, shift=12.0)
    changes = json.loads((folder / INDEX).read_text(encoding="utf-8")).get(KEY, {})
    known = {field.name for field in fields(Usual)}
    return replace(found, **{name: value for name, value in changes.items() if name in known})
