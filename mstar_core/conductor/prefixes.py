"""Prompt prefixes that ranks have read, so that a request goes where its prefix is probably cached. No tensors.

A prompt is cut into blocks of fixed size; a block's key hashes its content and the key of the block before. The ranks'
real prefix caches may have evicted a prefix that is known here: the request then costs what it costs anywhere.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.messages.requests import NewRequest
from mstar_core.messages.tensors import InlineTensor, TensorRef

BLOCK_IDS: Final = 32
"""Ids of one block."""

MOST_BLOCKS: Final = 256
"""Most blocks of a prompt that are hashed: 8192 ids."""

MOST_KNOWN: Final = 8192
"""Most blocks that are remembered for a rank; the oldest are forgotten."""

ID_DTYPES: Final = ("int64", "int32")


def prefix_keys(message: NewRequest) -> list[bytes]:
    """Return the keys of a prompt's blocks, up to content that is not known here."""
    parts = _parts(message)
    keys: list[bytes] = []
    digest = b""
    for data, size in parts:
        for start in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[start : start + size], digest_size=16).digest()
            keys.append(digest)
            if len(keys) == MOST_BLOCKS:
                return keys
        if len(data) % size:
            return keys  # what follows is not aligned to blocks in other prompts
    return keys


def _parts(message: NewRequest) -> Iterable[tuple[bytes, int]]:
    """Yield the content of a prompt in order, and the size of its blocks in bytes."""
    if not message.segments:
        yield from (_ids(ref) for ref in message.inputs.values() if _is_prompt(ref))
        return
    for segment in message.segments:
        ids = [ref for ref in segment.inputs.values() if _is_prompt(ref)]
        if segment.content:
            yield segment.content, len(segment.content)
        elif len(segment.inputs) == len(ids) == 1:
            yield _ids(ids[0])
        else:
            return


def _is_prompt(ref: TensorRef) -> bool:
    return isinstance(ref, InlineTensor) and ref.dtype in ID_DTYPES and len(ref.shape) == 1 and ref.shape[0] > 1


def _ids(ref: TensorRef) -> tuple[bytes, int]:
    assert isinstance(ref, InlineTensor)
    return ref.data, BLOCK_IDS * (8 if ref.dtype == "int64" else 4)


@dataclass(slots=True)
class Prefixes:
    """Blocks that each rank has read, newest last. Owned by the router."""

    _known: dict[int, OrderedDict[bytes, None]] = field(default_factory=dict)

    def match(self, rank: int, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks that a rank has read."""
        known = self._known.get(rank)
        if not known:
            return 0
        return next((number for number, key in enumerate(keys) if key not in known), len(keys))

    def read(self, rank: int, keys: Iterable[bytes]) -> None:
        """Note that a rank reads these blocks now."""
        known = self._known.setdefault(rank, OrderedDict())
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > MOST_KNOWN:
            known.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget a rank whose process has ended."""
        self._known.pop(rank, None)
