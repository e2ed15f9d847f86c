"""Changes of a node's device state that precede the forward passes of a step, in order. Part of a `StepPlan`.

The scheduler records them while it decides; the runner carries them out. Followers of a tensor-parallel group receive
them with the plan.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

NO_ID: Final = -1
"""Marks an entry that holds no id."""

STOP_WIDTH: Final = 8
"""Stop ids of a slot before its array is widened. One entry always stays NO_ID: a sequence whose draw failed stops."""


class PageCopy(NamedTuple):
    """A page that must be copied on the device before the next write."""

    source: int
    target: int


class SlotChanges(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag="slots"):
    """New values of slots; None where there are none.

    moved: int64 [2, n], slots and their last ids. armed: int64 [n, 1 + width], slots and their stop ids. blank: int64
    [n], slots whose seen ids and counts are cleared. seen: int64 [n], flat indices of seen ids. counted: int64 [n],
    flat indices of drawn ids to count, once for each entry.
    """

    moved: np.ndarray | None = None
    armed: np.ndarray | None = None
    blank: np.ndarray | None = None
    seen: np.ndarray | None = None
    counted: np.ndarray | None = None


class SlotCopied(msgspec.Struct, frozen=True, eq=False, tag="slot_copy"):
    """The device state of slot `source` copied to slot `into`."""

    source: int
    into: int


class PenaltiesRestored(msgspec.Struct, frozen=True, eq=False, tag="penalties"):
    """State that penalties read, of a slot whose cache came from another rank.

    seen: bool [vocabulary]; counts: int32 [vocabulary]. None where no penalty reads them.
    """

    slot: int
    seen: Tensor | None
    counts: Tensor | None


class LoopValuesSet(msgspec.Struct, frozen=True, eq=False, tag="loop_values"):
    """New values of a port of the resident loop: [n, ...] for slots int64 [n]."""

    port: str
    slots: np.ndarray
    values: Tensor


class PagesCleared(msgspec.Struct, frozen=True, eq=False, tag="clear"):
    """Pages to zero, which an earlier owner has written."""

    pages: list[int]


class PagesCopied(msgspec.Struct, frozen=True, eq=False, tag="copy"):
    """Pages to copy in every layer."""

    copies: list[PageCopy]


class PagesSaved(msgspec.Struct, frozen=True, eq=False, tag="save"):
    """Pages to copy to the host, under a number. They may be released at once."""

    number: int
    pages: list[int]


class PagesRestored(msgspec.Struct, frozen=True, eq=False, tag="restore"):
    """Saved pages to write back into these pages, in token order."""

    number: int
    pages: list[int]


class PagesDropped(msgspec.Struct, frozen=True, eq=False, tag="drop"):
    """Saved pages that no sequence needs any more."""

    numbers: list[int]


class PagesArrived(msgspec.Struct, frozen=True, eq=False, tag="arrive"):
    """Pages that came from another rank, kept as saved pages under a number. groups: see `PageStore.gather`."""

    number: int
    groups: tuple[Tensor, ...]


Update = (
    SlotChanges
    | SlotCopied
    | PenaltiesRestored
    | LoopValuesSet
    | PagesCleared
    | PagesCopied
    | PagesSaved
    | PagesRestored
    | PagesDropped
    | PagesArrived
)
"""One change of device state."""
