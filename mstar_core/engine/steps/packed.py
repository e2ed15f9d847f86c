"""Attention metadata and positions of the sequences of a plan, packed in one forward. Computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mstar_core.engine.steps.attention import AttentionMetadata, starts_of

if TYPE_CHECKING:
    from mstar_core.engine.steps.plan import DecodePlan, PassPlan


def metadata_of(passes: Sequence[PassPlan], tables: np.ndarray, decode: DecodePlan | None = None) -> AttentionMetadata:
    """Return the metadata of a decode batch and of passes behind it. Each iteration of a pass is a sequence of its own.

    tables: see StepPlan.
    """
    if not passes:
        if decode is None:
            return AttentionMetadata.empty(tables)
        return AttentionMetadata.of(decode.batch.slots, decode.lengths, tables, memory=decode.batch.memory)
    slots = np.array([planned.slot for planned in passes], dtype=np.int64)
    cached = np.array([planned.cached for planned in passes], dtype=np.int64)
    tokens = [planned.item_tokens for planned in passes]
    often = [planned.iterations for planned in passes]
    if max(often) > 1:
        before = [number * count for count, times in zip(tokens, often, strict=True) for number in range(times)]
        slots, cached = np.repeat(slots, often), np.repeat(cached, often) + before
        tokens = np.repeat(tokens, often).tolist()
    memory = _memory(passes, often, decode)
    masks = [(planned.attend.mask == "causal", planned.attend.write) for planned in passes]
    if decode is None and masks.count(masks[0]) == len(masks):
        # The record keeps what it derives from one number of tokens for all sequences.
        counts = tokens[0] if min(tokens) == max(tokens) else np.array(tokens, dtype=np.int64)
        return AttentionMetadata.of(
            slots, cached, tables, counts, causal=masks[0][0], writes=masks[0][1], memory=memory
        )
    causal, writes = (np.repeat(flags, often) for flags in zip(*masks, strict=True))
    counts = np.array(tokens, dtype=np.int64)
    if decode is not None:
        ones = np.ones(len(decode), dtype=np.int64)
        slots, cached = np.concatenate([decode.batch.slots, slots]), np.concatenate([decode.lengths, cached])
        causal, writes = (np.concatenate([ones.astype(np.bool_), flags]) for flags in (causal, writes))
        counts = np.concatenate([ones, counts])
    return AttentionMetadata(
        query_starts=starts_of(counts),
        page_rows=slots,
        lengths=cached,
        causal=causal,
        writes=writes,
        tables=tables,
        memory=memory,
    )


def _memory(passes: Sequence[PassPlan], often: Sequence[int], decode: DecodePlan | None) -> np.ndarray | None:
    """Return slot and tokens of the memory of each sequence, see AttentionMetadata."""
    if any(planned.memory is None for planned in passes):
        return None
    memory = np.repeat(np.array([planned.memory for planned in passes], dtype=np.int64).T, often, axis=1)
    return memory if decode is None else np.concatenate([decode.batch.memory, memory], axis=1)


def host_positions(passes: Sequence[PassPlan]) -> np.ndarray:
    """Return the positions of all tokens of passes without given ones: int64 [tokens], or float32."""
    if len(passes) == 1:
        return _positions(passes[0])
    if all(each.attend.positions == "shared" and each.iterations == 1 for each in passes):
        positions = np.array([each.position for each in passes])
        return _typed(np.repeat(positions, [each.count for each in passes]))
    return np.concatenate([_positions(each) for each in passes])


def _positions(planned: PassPlan) -> np.ndarray:
    # By numpy: torch takes several times as long for an arange this short.
    if planned.attend.positions == "shared":
        if planned.iterations == 1:
            return _typed(np.full(planned.count, planned.position))
        numbers = planned.position + np.arange(planned.iterations)
        return _typed(np.repeat(numbers, planned.item_tokens))
    return _typed(planned.position + np.arange(planned.count))


def _typed(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32) if numbers.dtype.kind == "f" else numbers
