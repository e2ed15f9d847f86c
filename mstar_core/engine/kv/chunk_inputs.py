"""Lays what the pieces of a plain forward bring side by side, ports and positions. Used by the KV step.

Ids, numbers and small values may still be on the host: those of all pieces travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.kv.positions import positions_of
from mstar_core.engine.upload import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.kv.batch import Piece


def packed_ports(pieces: Sequence[Piece], ids: Tensor | None, device: torch.device) -> dict[str, Tensor | list[Tensor]]:
    """The module's ports. ids: int64 [n] on the device, of decode rows before the pieces, which are then ids too."""
    first = pieces[0].firing
    ports: dict[str, Tensor | list[Tensor]] = {}
    for name, axis in first.axes.items():
        if name in first.per_row:
            ports[name] = _of_rows([value for piece in pieces for value in piece.firing.of_rows(name)], device)
            continue
        cuts = [_cut(piece, piece.firing.ports[name], piece.firing.axes[name]) for piece in pieces]
        cuts = _together(cuts, device, axis or 0)
        if ids is not None:
            cuts.insert(0, ids)
        ports[name] = cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim=axis or 0)
    return ports


def packed_positions(pieces: Sequence[Piece], own: Tensor | None, device: torch.device) -> Tensor:
    """Positions of all tokens, int64 [T] or as a port gives them. own: on the device, of decode rows before."""
    where = [positions_of(piece.firing, piece.count) for piece in pieces]
    if all(piece.firing.given is None for piece in pieces):
        where = _together(where, device, 0)
    if own is not None:
        where.insert(0, own)
    return where[0] if len(where) == 1 else torch.cat(where, dim=-1)


def _of_rows(values: list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """One value per row, stacked where their shapes agree."""
    if any(value.shape != values[0].shape for value in values):
        return [upload(value, device) for value in values]
    if all(value.is_cpu for value in values):
        return upload(torch.stack(values), device)
    return torch.stack([upload(value, device) for value in values])


def _cut(piece: Piece, value: Tensor, axis: int | None) -> Tensor:
    if axis is None or piece.count == piece.firing.tokens:
        return value
    return value.narrow(axis, piece.firing.done, piece.count)


def _together(values: list[Tensor], device: torch.device, axis: int) -> list[Tensor]:
    """Values of several pieces on the device, joined and copied at once where they are on the host."""
    if not all(value.is_cpu for value in values):
        return [upload(value, device) for value in values]
    return [upload(values[0].contiguous() if len(values) == 1 else torch.cat(values, dim=axis), device)]
