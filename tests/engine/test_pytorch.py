"""Attention in PyTorch: passes that read a cached prefix, of any lengths in one forward, and static shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.flashinfer import FlashInferView
from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.base import LoopSpec
from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape, starts_of
from mstar_core.graph.declare.nodes import Attend
from tests.engine.tiny_engine import Driver, make_engine, prompt
from tests.engine.tiny_world import numbers

PAGE, KV_HEADS, HEADS, WIDTH = 4, 2, 4, 8
CACHED = [0, 3, 4, 11]
COUNTS = [5, 2, 5, 1]


def filled() -> tuple[list[Tensor], np.ndarray]:
    """A pool of random values, and the pages of four sequences in it."""
    generator = torch.Generator().manual_seed(1)
    pools = [torch.randn(17, 2, PAGE, KV_HEADS, WIDTH, generator=generator) for _ in range(2)]
    return pools, np.array([[4 * row + i for i in range(4)] for row in range(4)], dtype=np.int32)[:, ::-1].copy()


def passes(tables: np.ndarray, order: list[int]) -> AttentionMetadata:
    lengths, counts = np.array(CACHED)[order], np.array(COUNTS)[order]
    return AttentionMetadata.of(np.array(order), lengths, tables, counts, causal=False, writes=False)


def plain(pool: Tensor, tables: np.ndarray, row: int, new: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One sequence alone: its cached keys in order, then the new ones, no mask."""
    query, key, value = new
    halves = [pool[tables[row].tolist(), half].reshape(-1, KV_HEADS, WIDTH)[: CACHED[row]] for half in (0, 1)]
    keys, values = torch.cat([halves[0], key]), torch.cat([halves[1], value])
    groups = HEADS // KV_HEADS
    keys, values = (part.repeat_interleave(groups, 1).transpose(0, 1) for part in (keys, values))
    return scaled_dot_product_attention(query.transpose(0, 1), keys, values).transpose(0, 1)


def views(name: str, pools: list[Tensor], metadata: AttentionMetadata) -> Any:
    attention = TorchAttention(pools, PAGE)
    if name == "torch":
        return attention.plan(metadata)
    flashinfer = SimpleNamespace(pools=pools, page_size=PAGE, plain=attention)
    return FlashInferView(flashinfer, metadata)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0], [2]])
def test_each_sequence_sees_its_own_prefix_and_its_own_tokens(order: list[int], name: str) -> None:
    pools, tables = filled()
    before = [pool.clone() for pool in pools]
    view = views(name, pools, passes(tables, order))
    total = sum(COUNTS[row] for row in order)
    for layer, pool in enumerate(pools):
        generator = torch.Generator().manual_seed(9 + layer)
        query = torch.randn(total, HEADS, WIDTH, generator=generator)
        key, value = (torch.randn(total, KV_HEADS, WIDTH, generator=generator) for _ in range(2))
        out, start = view.attend(layer, query, key, value), 0
        for row in order:
            tokens = slice(start, start + COUNTS[row])
            expected = plain(pool, tables, row, (query[tokens], key[tokens], value[tokens]))
            torch.testing.assert_close(out[tokens], expected, atol=1e-6, rtol=1e-5)
            start += COUNTS[row]
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True)), "nothing is appended"


def test_a_mixed_forward_equals_its_sequences_alone() -> None:
    """Two decode sequences, a prefill chunk, a pass that only reads and one of one token, in this order."""
    pools, _ = filled()
    tables = np.random.default_rng(3).permutation(15).reshape(5, 3).astype(np.int32)
    mixed = AttentionMetadata(
        query_starts=starts_of(np.array([1, 1, 5, 3, 1])),
        page_rows=np.array([3, 0, 1, 4, 2]),
        lengths=np.array([2, 9, 4, 10, 6]),
        causal=np.array([True, True, True, False, False]),
        writes=np.array([True, True, True, False, True]),
        tables=tables,
    )
    query, key, value = (torch.randn(mixed.tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    together, alone = [pools[0].clone()], [pools[0].clone()]
    out = TorchAttention(together, PAGE).plan(mixed).attend(0, query, key, value)
    for number in range(5):
        one = mixed.select(slice(number, number + 1))
        tokens = slice(*mixed.query_starts[number : number + 2].tolist())
        expected = TorchAttention(alone, PAGE).plan(one).attend(0, query[tokens], key[tokens], value[tokens])
        torch.testing.assert_close(out[tokens], expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize("cached", [[9, 0], [0, 0], [8, 12], [1, 5]], ids=str)
def test_dense_passes_equal_folded_ones(cached: list[int]) -> None:
    counts = [7, 5]
    pools, tables = filled()
    query, key, value = (torch.randn(sum(counts), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    lengths, tokens = np.array(cached), np.array(counts)
    metadata = AttentionMetadata.of(np.arange(2), lengths, tables, tokens, causal=False, writes=False)
    attention = TorchAttention(pools, PAGE)
    expected = attention.plan(metadata).attend(0, query, key, value)
    torch.testing.assert_close(attention.dense(metadata).attend(0, query, key, value), expected, atol=1e-6, rtol=1e-6)


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
    for handle, latents in together.items():
        expected = flows([handle])[0][handle]
        torch.testing.assert_close(latents, expected, atol=1e-6, rtol=1e-5)
    pages = sum(-(-(3 + 5 * handle) // 4) for handle in together)
    assert driver.engine.memory().pages_used == pages, "their tokens took no place"


# -- static shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0], [2]])
def test_each_row_sees_its_own_places_and_none_that_are_unused(order: list[int], writes: bool) -> None:
    """Places behind the last token of a sequence, those of other sequences and spare ones hold NaN."""
    pools, tables = filled()
    for pool in pools:
        for row, cached in enumerate(CACHED):
            for place in range(cached, 4 * PAGE):
                pool[tables[row, place // PAGE], :, place % PAGE] = float("nan")
        pool[-1] = float("nan")
    tokens, rows = 3, np.array(order, dtype=np.int64)
    shape = AttentionShape(sequences=4, tokens=tokens, pages=4, writes=writes)
    attention = AttentionBuffers(TorchAttention(pools, PAGE).static(shape), torch.device("cpu"))
    before = [pool.clone() for pool in pools]
    lengths = np.array(CACHED)[rows]
    attention.prepare(AttentionMetadata.of(rows, lengths, tables, tokens, causal=False, writes=writes))
    for layer, pool in enumerate(before):
        query = numbers(9 + layer, 4 * tokens, HEADS, 8)
        key, value = (numbers(seed + layer, 4 * tokens, KV_HEADS, 8) for seed in (20, 30))
        found = attention.view.attend(layer, query, key, value)
        for index, row in enumerate(order):
            own = slice(index * tokens, (index + 1) * tokens)
            torch.testing.assert_close(
                found[own], plain(pool, tables, row, (query[own], key[own], value[own])), atol=1e-6, rtol=1e-5
            )
            at = torch.arange(CACHED[row], CACHED[row] + tokens)
            held = pools[layer][torch.from_numpy(tables[row])][at // PAGE, 0, at % PAGE]
            assert torch.equal(held, key[own]) if writes else held.isnan().all(), "appended, or not"


@pytest.mark.parametrize("cached", [0, 5, 8])
def test_fixed_attention_equals_the_plain_one(cached: int) -> None:
    generator = torch.Generator().manual_seed(cached)
    page, heads, kv_heads, width, tokens = 4, 6, 2, 8, 24
    tables = PageTables(PagePool(20, page), 3, 32)
    for row in range(3):
        tables.ensure(row, 24)
    pool = torch.randn(21, 2, page, kv_heads, width, generator=generator)
    rows, counts = np.array([2, 0]), np.array([7, 9])
    held = np.array([cached, 3])
    query, key, value = (torch.randn(tokens, n, width, generator=generator) for n in (heads, kv_heads, kv_heads))
    plain, fixed = [pool.clone()], [pool.clone()]
    prompts = AttentionMetadata.of(rows, held, tables.ids, counts)
    view = TorchAttention(plain, page).plan(prompts)
    expected = view.attend(0, query[:16], key[:16], value[:16])
    shape = AttentionShape(sequences=4, tokens=tokens, pages=tables.ids.shape[1], causal=True, is_ragged=True)
    form = AttentionBuffers(TorchAttention(fixed, page).static(shape), torch.device("cpu"))
    form.prepare(prompts)
    found = form.view.attend(0, query, key, value)[:16]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(fixed[0][:20], plain[0][:20])


def test_what_is_left_of_a_bucket_reaches_no_page() -> None:
    """Pages of other sequences hold NaN before and after; own pages are written up to the last token."""
    page, tokens, tables = 4, 16, np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::-1].copy()
    pool = torch.full((13, 2, page, 2, 8), float("nan"))
    shape = AttentionShape(sequences=3, tokens=tokens, pages=0, is_ragged=True, is_fresh=True)
    form = AttentionBuffers(TorchAttention([pool], page).static(shape), torch.device("cpu"))
    counts, rows = np.array([5, 6], dtype=np.int64), np.array([2, 0], dtype=np.int64)
    given = AttentionMetadata.of(rows, np.zeros(2, dtype=np.int64), tables, counts, causal=False)
    form.prepare(given)
    query, key, value = numbers(1, tokens, 4, 8), numbers(2, tokens, 2, 8), numbers(3, tokens, 2, 8)
    out = form.view.attend(0, query, key, value)
    assert out.isfinite().all(), "padding attends to padding"
    held = ~pool[:12].isnan().flatten(3).any(-1)
    assert held.sum() == 2 * counts.sum()
    for row, start, count in ((2, 0, 5), (0, 5, 6)):
        at = torch.arange(count)
        own = pool[torch.from_numpy(tables[row]).long()[at // page], :, at % page]
        assert torch.equal(own[:, 0], key[start : start + count])
        assert torch.equal(own[:, 1], value[start : start + count])


# -- windows ----------------------------------------------------------------------------------------------------------

WINDOW = 3


def seen_by(pool: Tensor, tables: np.ndarray, row: int, new: tuple[Tensor, Tensor, Tensor], window: int) -> Tensor:
    """One causal sequence alone, whose tokens see the newest `window` tokens; 0 for all."""
    query, key, value = new
    halves = [pool[tables[row].tolist(), half].reshape(-1, KV_HEADS, WIDTH)[: CACHED[row]] for half in (0, 1)]
    keys, values = torch.cat([halves[0], key]), torch.cat([halves[1], value])
    last = torch.arange(CACHED[row], len(keys))[:, None]
    place = torch.arange(len(keys))
    mask = (place <= last) & (place > last - (window or len(keys) + 1))
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (keys, values))
    return scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 1, 3, 5], [4, 2, 1, 3]], ids=["decode", "mixed", "passes"])
@pytest.mark.parametrize("form", ["view", "static"])
def test_a_layer_with_a_window_sees_the_newest_tokens_and_others_see_all(counts: list[int], form: str) -> None:
    pools, tables = filled()
    before = [pool.clone() for pool in pools]
    attention = TorchAttention(pools, PAGE, (WINDOW, 0))
    metadata = AttentionMetadata.of(np.arange(4), np.array(CACHED), tables, np.array(counts))
    total = sum(counts)
    view: Any = attention.plan(metadata)
    if form == "static":
        is_ragged = len(set(counts)) > 1
        tokens = total if is_ragged else counts[0]
        shape = AttentionShape(sequences=4, tokens=tokens, pages=4, causal=True, is_ragged=is_ragged)
        buffers = AttentionBuffers(attention.static(shape), torch.device("cpu"))
        buffers.prepare(metadata)
        view = buffers.view
    for layer, window in enumerate((WINDOW, 0)):
        query = numbers(9 + layer, total, HEADS, WIDTH)
        key, value = (numbers(seed + layer, total, KV_HEADS, WIDTH) for seed in (20, 30))
        out = view.attend(layer, query, key, value)
        for row, start in enumerate(starts_of(np.array(counts))[:-1]):
            own = slice(int(start), int(start) + counts[row])
            expected = seen_by(before[layer], tables, row, (query[own], key[own], value[own]), window)
            torch.testing.assert_close(out[own], expected, atol=1e-6, rtol=1e-5)
