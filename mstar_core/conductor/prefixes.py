"""Prompt prefixes that ranks have read, so that a request goes where its prefix is probably cached. No tensors.

A prompt is cut into blocks of fixed size; a block's key hashes its content and the key of the block before. The ranks'
real prefix caches may have evicted a prefix that is known here: the request then costs what it costs anywhere.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mstar_core.messages.requests import NewRequest
from mstar_core.messages.tensors import InlineTensor, TensorRef

BLOCK_IDS: Final = 32
"""Ids of one block."""

MOST_BLOCKS: Final = 256
"""Most blocks of a prompt that are hashed: 8192 ids."""

MOST_KNOWN: Final = 8192
"""Most blocks that are remembered for a rank; the oldest are forgotten."""

ID_DTYPES: Final = ("int64", "int32")


class Block(NamedTuple):
    """Part of a prompt. key: hash of its content and of all before it. ids: positions that it takes in the cache."""

    key: bytes
    ids: int


def prefix_blocks(message: NewRequest) -> list[Block]:
    """Return the blocks of a prompt, up to content that is not known here."""
    blocks: list[Block] = []
    digest = message.salt
    for data, size, ids in _parts(message):
        for start in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[start : start + size], digest_size=16).digest()
            blocks.append(Block(digest, ids))
            if len(blocks) == MOST_BLOCKS:
                return blocks
        if len(data) % size:
            return blocks  # what follows is not aligned to blocks in other prompts
    return blocks


def _parts(message: NewRequest) -> Iterable[tuple[bytes, int, int]]:
    """Yield the content of a prompt in order, the size of its blocks in bytes, and the positions that each takes."""
    if not message.segments:
        yield from (_ids(ref) for ref in message.inputs.values() if _is_prompt(ref))
        return
    for segment in message.segments:
        ids = [ref for ref in segment.inputs.values() if _is_prompt(ref)]
        if segment.content:
            yield segment.content, len(segment.content), segment.length
        elif len(segment.inputs) == len(ids) == 1:
            yield _ids(ids[0])
        else:
            return


def _is_prompt(ref: TensorRef) -> bool:
    return isinstance(ref, InlineTensor) and ref.dtype in ID_DTYPES and len(ref.shape) == 1 and ref.shape[0] > 1


def _ids(ref: TensorRef) -> tuple[bytes, int, int]:
    assert isinstance(ref, InlineTensor)
    return ref.data, BLOCK_IDS * (8 if ref.dtype == "int64" else 4), BLOCK_IDS


@dataclass(slots=True)
class Prefixes:
    """Blocks that each rank has read, newest last. Owned by the router."""

    _known: dict[int, OrderedDict[bytes, None]] = field(default_factory=dict)

    def match(self, rank: int, blocks: Sequence[Block]) -> int:
        """Return the number of leading positions of a prompt that a rank has read."""
        known: Mapping[bytes, None] = self._known.get(rank) or {}
        return sum(block.ids for block in itertools.takewhile(lambda block: block.key in known, blocks))

    def read(self, rank: int, blocks: Iterable[Block]) -> None:
        """Note that a rank reads these blocks now."""
        known = self._known.setdefault(rank, OrderedDict())
        for key, _ in blocks:
            known[key] = None
            known.move_to_end(key)
        while len(known) > MOST_KNOWN:
            known.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget a rank whose process has ended."""
        self._known.pop(rank, None)
