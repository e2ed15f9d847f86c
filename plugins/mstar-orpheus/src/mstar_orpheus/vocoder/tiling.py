"""Tile sizes of the vocoder's GEMMs. Used by `fused_decoder`; measured by `bench/gpu_codec_tiles.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

PRECISION: Final = "split"
"""`split`: three TF32 passes on the tensor cores. Triton's `ieee` and `tf32x3` are also possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows, columns and depth of a tile, and Triton's warps and stages."""

    bm: int
    bn: int
    bk: int = 32
    warps: int = 4
    stages: int = 3

    @property
    def launch(self) -> dict[str, int]:
        """Launch arguments of a kernel."""
        return {"bm": self.bm, "bn": self.bn, "bk": self.bk, "num_warps": self.warps, "num_stages": self.stages}


def tile(kind: str, rows: int, columns: int) -> Tile:
    """Return the tile for a GEMM of `rows` by `columns`. kind: pointwise, upsample or unit.

    Source: a sweep over 23 tiles per layer at 1, 8, 32 and 64 windows on one H100 (`bench/gpu_codec_tiles.py`).
    """
    area = rows * columns
    match kind:
        case "unit":
            chosen = _of_unit(area, columns)
        case "upsample":
            small = Tile(bm=32, bn=32, bk=64)
            large = Tile(bm=64, bn=64) if area < 2_000_000 else Tile(bm=64, bn=128)
            chosen = small if area < 130_000 else Tile(bm=64, bn=32) if area < 600_000 else large
        case _:
            small = Tile(bm=16, bn=32, stages=4)
            chosen = small if area < 140_000 else Tile(bm=64, bn=32) if area < 900_000 else Tile(bm=64, bn=64)
    return replace(chosen, bn=min(chosen.bn, max(16, 1 << (columns - 1).bit_length())))


def _of_unit(area: int, columns: int) -> Tile:
    if area < 200_000:
        return Tile(bm=16, bn=32, warps=2, stages=2)
    if area < 600_000 or (columns <= 64 and area < 2_000_000):
        return Tile(bm=64, bn=64)
    if area < 1_000_000:
        return Tile(bm=64, bn=128)
    return Tile(bm=128, bn=128, warps=8, stages=2)
