"""Division of small tensors among messages below the limit of one. Used by the conductor and the worker's outbox."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from mstar_core.messages.tensors import InlineTensor

PART_BYTES: Final = 6 << 20
"""Most bytes of tensors inside one message beside a single larger one; below half of the limit of a message."""

T = TypeVar("T")


def inline_numbers(numbers: Sequence[float]) -> InlineTensor:
    """Return a tensor of numbers inside a message: int64 [n] if all are integers, else float32 [n]."""
    is_whole = all(isinstance(number, int) for number in numbers)
    # The module `array` and not NumPy, which the conductor does not load.
    values: array[int] | array[float] = array("q", map(int, numbers)) if is_whole else array("f", numbers)
    return InlineTensor(dtype="int64" if is_whole else "float32", shape=(len(numbers),), data=values.tobytes())


def inline_bytes(ref: object) -> int:
    """Return the bytes of a tensor inside a message, 0 for any other reference."""
    return len(ref.data) if isinstance(ref, InlineTensor) else 0


def in_parts(items: Iterable[T], size_of: Callable[[T], int]) -> list[list[T]]:
    """Divide items, in order, among messages below the limit. At least one part, which may be empty.

    size_of: bytes of an item's tensors inside the message.
    """
    parts: list[list[T]] = [[]]
    left = PART_BYTES
    for item in items:
        size = size_of(item)
        if size > left and parts[-1]:
            parts.append([])
            left = PART_BYTES
        left -= size
        parts[-1].append(item)
    return parts
