"""Passes that read a cached prefix and their own tokens and append nothing: rows of any lengths in one forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.eager import EagerAttention
from mstar_core.engine.attention.flashinfer import FlashInferView
from mstar_core.engine.base import LoopSpec
from mstar_core.engine.steps.attention import AttentionMetadata
from mstar_core.graph.declare.nodes import Attend
from tests.engine.tiny_engine import Driver, make_engine, prompt

PAGE, KV_HEADS, HEADS, WIDTH = 4, 2, 4, 8
CACHED = [0, 3, 4, 11]
COUNTS = [5, 2, 5, 1]


def filled() -> tuple[list[Tensor], np.ndarray]:
    """A pool of random values, and the pages of four rows in it."""
    generator = torch.Generator().manual_seed(1)
    pools = [torch.randn(17, 2, PAGE, KV_HEADS, WIDTH, generator=generator) for _ in range(2)]
    return pools, np.array([[4 * row + i for i in range(4)] for row in range(4)], dtype=np.int32)[:, ::-1].copy()


def packed(tables: np.ndarray, order: list[int]) -> AttentionMetadata:
    lengths, counts = np.array(CACHED)[order], np.array(COUNTS)[order]
    return AttentionMetadata.of(np.array(order), lengths, tables, counts, causal=False, writes=False)


def plain(pool: Tensor, tables: np.ndarray, row: int, own: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One row alone: its cached keys in order, then its own, no mask."""
    query, key, value = own
    halves = [pool[tables[row].tolist(), half].reshape(-1, KV_HEADS, WIDTH)[: CACHED[row]] for half in (0, 1)]
    keys, values = torch.cat([halves[0], key]), torch.cat([halves[1], value])
    groups = HEADS // KV_HEADS
    keys, values = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (keys, values))
    return scaled_dot_product_attention(query.transpose(0, 1), keys, values).transpose(0, 1)


def views(name: str, pools: list[Tensor], rows: AttentionMetadata) -> Any:
    eager = EagerAttention(pools, PAGE)
    if name == "torch":
        return eager.plan(rows)
    return FlashInferView(SimpleNamespace(pools=pools, page_size=PAGE, plain=eager), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0], [2]])
def test_each_row_sees_its_own_prefix_and_its_own_tokens(order: list[int], name: str) -> None:
    pools, tables = filled()
    before = [pool.clone() for pool in pools]
    view = views(name, pools, packed(tables, order))
    total = sum(COUNTS[row] for row in order)
    for layer, pool in enumerate(pools):
        generator = torch.Generator().manual_seed(9 + layer)
        query = torch.randn(total, HEADS, WIDTH, generator=generator)
        key, value = (torch.randn(total, KV_HEADS, WIDTH, generator=generator) for _ in range(2))
        found, at = view.attend(layer, query, key, value), 0
        for row in order:
            own = slice(at, at + COUNTS[row])
            expected = plain(pool, tables, row, (query[own], key[own], value[own]))
            torch.testing.assert_close(found[own], expected, atol=1e-6, rtol=1e-5)
            at += COUNTS[row]
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True)), "nothing is appended"


def flows(handles: list[int], lookahead: int = 0) -> tuple[dict[int, Tensor], Driver]:
    """Flows of requests with prefixes and numbers of steps of their own."""
    driver = Driver(make_engine(lookahead=lookahead), lookahead)
    keys = {}
    for handle in handles:
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 3 + 5 * handle), sample=False, attend=Attend(mask="full"))
        loop = LoopSpec(max_iters=2 + handle, carry={"latents_out": "latents"}, fused=True)
        keys[handle] = driver.submit(
            handle,
            inputs={"latents": torch.ones(4, 32) * handle},
            outputs=("latents_out",),
            sample=False,
            loop=loop,
            attend=Attend(mask="full", write=False),
        )
    driver.run()
    return {handle: driver.done[key].outputs["latents_out"] for handle, key in keys.items()}, driver


@pytest.mark.parametrize("lookahead", [0, 1])
def test_flows_of_several_requests_equal_each_alone(lookahead: int) -> None:
    together, driver = flows([0, 1, 2, 3], lookahead)
    for handle, found in together.items():
        expected = flows([handle])[0][handle]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    pages = sum(-(-(3 + 5 * handle) // 4) for handle in together)
    assert driver.engine.memory().pages_used == pages, "their tokens took no place"
