"""LoRA adapters of the sequences of a forward: the spans of tokens that use each, computed on the host.

Captured steps keep them in fields of fixed size; zeros are empty spans, so padding and batches without adapters need no
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import NO_ADAPTER
from mstar_core.engine.transfers import upload
from mstar_core.layers.lora import AdapterBlocks

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields
    from mstar_core.engine.steps.plan import DecodeBatch, PassPlan
    from mstar_core.layers.lora import AdapterBank

BLOCK_TOKENS: Final = 16
"""Most tokens of one block, as the kernels take them."""

ORDER, BLOCKS = "adapter_order", "adapter_blocks"


def adapter_rows(decode: DecodeBatch | None, passes: Sequence[PassPlan]) -> np.ndarray | None:
    """Return the adapter of each packed token, int64 [T]; None if no sequence has one."""
    rows = [] if decode is None else [_decode_rows(decode)]
    if passes:
        rows.append(np.repeat([planned.adapter for planned in passes], [planned.count for planned in passes]))
    packed = np.concatenate(rows)
    return packed if np.any(packed != NO_ADAPTER) else None


def _decode_rows(decode: DecodeBatch) -> np.ndarray:
    return decode.adapters if decode.adapters is not None else np.full(len(decode.slots), NO_ADAPTER, dtype=np.int64)


def adapter_blocks(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `order` int32 [T'] and `blocks` int32 [B, 3] of AdapterBlocks. rows: adapter of each packed token."""
    order = np.argsort(rows, kind="stable")[np.count_nonzero(rows == NO_ADAPTER) :]
    present, starts = np.unique(rows[order], return_index=True)
    ends = np.append(starts[1:], len(order))[: len(present)]
    blocks = [
        (row, first, min(first + BLOCK_TOKENS, end))
        for row, start, end in zip(present.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for first in range(start, end, BLOCK_TOKENS)
    ]
    return order.astype(np.int32), np.array(blocks, dtype=np.int32).reshape(-1, 3)


def adapter_fields(bank: AdapterBank | None, tokens: int) -> Fields:
    """Return the fields of a captured step of so many tokens; none without adapters."""
    if bank is None:
        return {}
    most = min(tokens, tokens // BLOCK_TOKENS + bank.limits.count)
    return {ORDER: (torch.int32, tokens), BLOCKS: (torch.int32, 3 * most)}


def adapter_values(rows: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the values of the fields, none if no token has an adapter."""
    if rows is None:
        return {}
    order, blocks = adapter_blocks(rows)
    return {ORDER: order, BLOCKS: blocks.reshape(-1)}


def applying(bank: AdapterBank | None, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Apply the adapters in the fields of a captured step to the forwards of a block."""
    if bank is None:
        return nullcontext()
    return bank.applied(AdapterBlocks(values[ORDER], values[BLOCKS].view(-1, 3)))


def uploading(bank: AdapterBank | None, rows: np.ndarray | None, device: torch.device) -> AbstractContextManager[None]:
    """Apply adapters to the uncaptured forwards of a block. rows: adapter of each packed token, None without any."""
    if bank is None or rows is None:
        return nullcontext()
    order, blocks = adapter_blocks(rows)
    return bank.applied(AdapterBlocks(upload(order, device), upload(blocks, device)))
