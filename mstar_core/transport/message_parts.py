"""Division of small tensors among messages below the limit of one. Used by the conductor and the worker's outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from mstar_core.messages.tensors import InlineTensor

PART_BYTES: Final = 6 << 20
"""Most bytes of tensors inside one message beside a single larger one; below half of the limit of a message."""

T = TypeVar("T")


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
