"""Names of noise grids and solvers. Standard library only: read by every process."""

from __future__ import annotations

from typing import Final

GRIDS: Final = ("diffusers", "official")
"""Noise levels of current diffusers, and of the official repository, which ends above 0."""

SOLVERS: Final = ("unipc", "euler")
