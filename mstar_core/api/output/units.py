"""Units of outputs: ids, samples and whole values. Keeps what earlier attempts have delivered out of the next ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mstar_core.errors import EngineError
from mstar_core.plugin.surface import EVENTS, PROGRESS, units_of

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputItem:
    """Output of a worker. dtype: type of the numbers if NumPy does not support it (bfloat16)."""

    modality: str
    port: str
    array: Array
    meta: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None


class Delivered(msgspec.Struct, kw_only=True):
    """Outputs that the client of a request has or will get. Grows only, over all attempts.

    units: ids, samples, images and other values, by output port. events: place of the last one, by modality: of
    progress, the loops before it and its step; of images in the making, 0 and their number. chunks: by port, the chunks
    of a stream walk whose outputs are here as a whole, and their units; (-1, 0) if several walks use the port.
    """

    units: dict[str, int] = {}
    events: dict[str, tuple[int, int]] = {}
    chunks: dict[str, tuple[int, int]] = {}


class NewUnits:
    """Filter for the outputs of one attempt in order: passes what no earlier attempt has delivered."""

    def __init__(self, delivered: Delivered, *, is_first: bool) -> None:
        """is_first: of the first attempt, all outputs pass."""
        self._delivered = delivered
        self._is_first = is_first
        self._reached: Counter[str] = Counter()  # units of this attempt so far, by port
        self._place: dict[str, tuple[int, int]] = {}  # of the last event, by modality
        self._steps: dict[str, int] = {}  # of the last output of this attempt, by port

    def take(self, item: OutputItem, skipped: int = 0) -> OutputItem | None:
        """Return the new part of an output, None if the client has all of it. skipped: units left out before it.

        Raises EngineError if the client lacks some of the units that were left out.
        """
        if item.modality in EVENTS:
            return item if self._is_new_event(item, skipped) else None
        units, port = self._delivered.units, item.port
        known = units.get(port, 0)
        start = self._reached[port] + skipped
        if start > known:
            raise EngineError(f"{start - known} units of {port} were left out that the client does not have")
        count = units_of(item.modality, item.array.shape)
        self._reached[port] = end = start + count
        self._note_chunk(port, item.meta.get("step"), end)
        if end < known or (count and end == known):
            return None
        units[port] = end
        return item if start == known else replace(item, array=ids_or_samples(item)[known - start :])

    def _note_chunk(self, port: str, step: Any, end: int) -> None:
        """Note the chunk of an output. step: of its walk, if it has any; end: units of the port with this output."""
        chunks, last = self._delivered.chunks, self._steps.get(port, -1)
        if not isinstance(step, int):
            return
        self._steps[port] = step
        if step <= last:
            chunks[port] = (-1, 0)
        elif 0 <= chunks.get(port, (0, 0))[0] <= step:
            chunks[port] = (step + 1, end)

    def _is_new_event(self, item: OutputItem, skipped: int) -> bool:
        loop, number = self._place.get(item.modality, (0, 0))
        if item.modality == PROGRESS:
            step = int(item.array.reshape(-1)[0])
            place = (loop + (step <= number), step)  # the steps of the next loop begin again
        else:
            place = (0, number + skipped + 1)
        self._place[item.modality] = place
        is_new = self._is_first or place > self._delivered.events.get(item.modality, (-1, 0))
        if is_new:
            self._delivered.events[item.modality] = place
        return is_new


def ids_or_samples(item: OutputItem) -> Array:
    """Return a streamed output with one unit per element of axis 0: ids [n], samples [n] or [n, channels]."""
    return item.array.reshape(-1) if item.modality == "text" or not item.array.ndim else item.array
