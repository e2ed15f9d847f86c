"""Captured prompts on CUDA: against plain ones and the CPU, without a wait in `launch`, and captured while serving."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.flashinfer import FlashInferAttention
from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.scheduling.step import KVStep
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.linear import fuse_projections
from tests.engine.tiny_engine import Driver, TinyLM, generate, make_engine, prompt
from tests.gpu.test_engine import REQUESTS, SAMPLINGS, WIDE, WideLM, wide_engine

pytestmark = pytest.mark.gpu

BUCKETS = CaptureSizes(decode=(1, 8, 16), prefill=(16, 64))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every wait for the device that torch knows of an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Unwaiting(KVCacheEngine):
    """An engine whose launches may not wait, once `is_watched`."""

    is_watched = False

    def launch(self) -> KVStep | None:
        if not self.is_watched:
            return super().launch()
        with no_waiting():
            return super().launch()


@pytest.fixture
def wide(cuda: torch.device) -> WideLM:
    module = WideLM().to(cuda, torch.bfloat16)
    fuse_projections(module)
    return module


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [7, 64])
def test_captured_equals_eager_equals_cpu_in_float32(cuda: torch.device, lookahead: int, budget: int) -> None:
    expected = generate(REQUESTS)
    module = TinyLM().to(cuda)
    settings = {"device": cuda, "module": module, "lookahead": lookahead, "token_budget": budget}
    assert generate(REQUESTS, lookahead=lookahead, engine=make_engine(**settings)) == expected
    captured = make_engine(**settings, graphs=BUCKETS)
    assert generate(REQUESTS, lookahead=lookahead, engine=captured) == expected
    counters = captured.counters()
    assert counters["prefill_hits"] >= 2 and counters["prefill_misses"] == counters["graph_misses"] == 0


def test_pressure_and_the_prefix_cache_change_no_id_in_float32(cuda: torch.device) -> None:
    module = TinyLM().to(cuda)
    engine = make_engine(device=cuda, module=module, lookahead=1, num_pages=26, prefix_cache=False, graphs=BUCKETS)
    assert generate(REQUESTS, lookahead=1, engine=engine) == generate(REQUESTS)
    assert engine.memory().preempted > 0 and engine.memory().pages_used == 0
    head = prompt(9, 24)
    rows = [(head + prompt(seed, 1 + seed), 6, SAMPLINGS[seed % 4]) for seed in range(5)]
    engine = make_engine(device=cuda, module=module, lookahead=1, graphs=BUCKETS)
    found = [generate([row], lookahead=1, engine=engine)[0] for row in rows]
    assert found == [generate([row])[0] for row in rows]
    assert engine.counters()["prefill_tokens"] < sum(len(ids) for ids, _, _ in rows)


@pytest.mark.parametrize("tokens", [128, 512])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 128), (4, 4, 64), (8, 1, 128)])
def test_kernels_of_paged_prompts_against_float64(
    cuda: torch.device, tokens: int, heads: int, kv_heads: int, width: int
) -> None:
    generator, page = torch.Generator(cuda).manual_seed(tokens + heads), 16
    counts = np.array([1, 37, 40, 33]) if tokens == 128 else np.array([200, 1, 90, 64, 65])
    cached = np.array([50, 0, 16, 7, 300])[: len(counts)]
    rows = np.arange(len(counts))[::-1].copy()
    tables = PageTables(PagePool(200, page), len(counts), 512)
    for row, held in zip(rows, cached + counts, strict=True):
        tables.ensure(int(row), int(held))
    pool = torch.randn(201, 2, page, kv_heads, width, device=cuda, generator=generator)
    query, key, value = (
        torch.randn(tokens, n, width, device=cuda, generator=generator) for n in (heads, kv_heads, kv_heads)
    )
    pool, query, key, value = (each.to(torch.bfloat16) for each in (pool, query, key, value))
    from mstar_core.engine.attention.kernels.prefill import PagedPrefillAttention

    prompts = AttentionMetadata.of(rows, cached, tables.ids, counts)
    shape = AttentionShape(sequences=8, tokens=tokens, pages=tables.ids.shape[1], causal=True, is_ragged=True)
    fixed = AttentionBuffers(PagedPrefillAttention([pool.clone()], page, shape), cuda)
    fixed.prepare(prompts)
    torch.empty(tokens * heads * width, dtype=torch.bfloat16, device=cuda).fill_(float("nan"))  # what `empty` may get
    found = fixed.view.attend(0, query, key, value)
    plain = AttentionBuffers(TorchAttention([pool.double()], page).static(shape), cuda)
    plain.prepare(prompts)
    expected = plain.view.attend(0, query.double(), key.double(), value.double())
    used = int(counts.sum())
    error = float((found[:used].double() - expected[:used]).norm() / expected[:used].norm())
    assert error < 5e-3, error
    assert not found[used:].any()
    again = fixed.view.attend(0, query, key, value)
    assert torch.equal(again, found)


def test_captured_bfloat16_stays_with_the_plain_prompt(cuda: torch.device, wide: WideLM) -> None:
    rows = [(prompt(seed, 5 + 9 * seed), 1, SamplingParams()) for seed in range(6)]
    pools, firsts = [], []
    for graphs in ((1, 8), CaptureSizes(decode=(1, 8), prefill=(128, 256))):
        engine = wide_engine(cuda, wide, graphs=graphs, token_budget=256, prefix_cache=False)
        firsts.append([ids[0] for ids in generate(rows, lookahead=1, engine=engine)])
        attention = engine._runner._attention
        assert isinstance(attention, FlashInferAttention)
        pools.append(attention.pools[1][:-1].float())
    assert engine.counters()["prefill_hits"] >= 1 and engine.counters()["prefill_misses"] == 0
    error = float((pools[0] - pools[1]).norm() / pools[0].norm())
    print(f"keys and values of layer 2, captured against plain: {error:.2e}")
    assert error < 0.01
    assert sum(a == b for a, b in zip(*firsts, strict=True)) >= 5


def test_no_launch_waits_for_the_device(cuda: torch.device, wide: WideLM) -> None:
    """Prompts, chunks, decode, mixtures, ends, closes, cached prefixes: nothing in `launch` asks the device."""
    settings = KVSettings(
        device=cuda,
        dtype=torch.bfloat16,
        num_pages=60,
        page_size=16,
        max_slots=8,
        max_seq_len=256,
        vocab=2000,
        token_budget=64,
        attention="flashinfer",
        lookahead=1,
        graphs=CaptureSizes(decode=(1, 8), prefill=(16, 64)),
    )
    engine = Unwaiting(WIDE, wide, settings)
    storm(engine, 20, random.Random(1))
    engine.is_watched = True
    storm(engine, 200, random.Random(2))
    counters = engine.counters()
    assert counters["prefill_hits"] > 100 and counters["prefill_misses"] == counters["graph_misses"] == 0
    assert (engine.memory().pages_used, engine.memory().slots_used) == (0, 0)


def storm(engine: KVCacheEngine, requests: int, chance: random.Random) -> None:
    """Requests of all lengths that come, end and are cancelled at random."""
    driver, opened = Driver(engine, 1), list[int]()
    driver.keys = 1000 * chance.randrange(1, 1_000_000)
    head = prompt(5, 40)
    for number in range(requests):
        handle = driver.keys + number
        driver.open(handle, SAMPLINGS[number % 4], max_tokens=200)
        ids = (head if number % 3 else []) + prompt(number, 1 + number % 90)
        driver.prefill(handle, ids, tokens_hash_seed=b"")
        driver.decode(handle, 1 + number % 40, stop=(5, 9))
        opened.append(handle)
        for _ in range(chance.randrange(6)):
            driver.turn()
        while len(opened) > 12 or (opened and chance.random() < 0.2):
            engine.close(Handle(opened.pop(chance.randrange(len(opened)))))
    for handle in opened:
        engine.close(Handle(handle))
    driver.run()
    assert not driver.failed, driver.failed


def test_buckets_are_captured_while_idle_and_used_from_then_on(cuda: torch.device, wide: WideLM) -> None:
    later = CaptureSizes(decode=(8,), prefill=(64,), decode_later=(2,), prefill_later=(16,))
    engine = wide_engine(cuda, wide, graphs=later)
    rows = [(prompt(seed, 9), 12, SamplingParams(repetition_penalty=1.1)) for seed in range(2)]
    first = generate(rows, lookahead=1, engine=engine)
    before = engine.counters()
    driver = Driver(engine, 1)
    driver.open(50, max_tokens=120)
    opened = driver.prefill(50, prompt(3, 20))
    driver.run()
    assert engine.idle() and not engine.idle()
    after = engine.counters()
    assert after["graphs_captured"] == before["graphs_captured"] + 2
    assert after["graph_bytes"] >= before["graph_bytes"] > 0
    # A request that was open while the others were captured goes on as if nothing had happened.
    loop = driver.decode(50, 20)
    driver.run()
    alone = wide_engine(cuda, wide, graphs=CaptureSizes(decode=(1,), prefill=(64,)))
    ids = generate([(prompt(3, 20), 20, SamplingParams())], lookahead=1, engine=alone)[0]
    assert int(driver.done[opened].outputs["token"]) == ids[0] and driver.ids[loop][:3] == ids[1:4]
    engine.close(Handle(50))
    again = generate(rows, lookahead=1, engine=engine)
    assert [row[0] for row in again] == [row[0] for row in first]
    assert engine.counters()["prefill_misses"] == engine.counters()["graph_misses"] == 0


def test_a_cancel_in_the_middle_of_a_captured_prompt(cuda: torch.device, wide: WideLM) -> None:
    engine = wide_engine(cuda, wide, graphs=CaptureSizes(decode=(8,), prefill=(32,)), token_budget=32)
    for handle in range(3):
        engine.open(Handle(handle), SamplingParams(), 200)
        ids = torch.tensor(prompt(handle, 90))
        engine.submit(Job(key=JobKey(handle), handle=Handle(handle), inputs={"tokens": ids}, outputs=("token",)))
        loop = LoopSpec(max_iters=5, carry={"token": "token"}, stop_port="token")
        engine.submit(Job(key=JobKey(10 + handle), handle=Handle(handle), loop=loop, outputs=("token",)))
    running = [engine.launch(), engine.launch()]
    engine.close(Handle(0))
    done: list[int] = []
    while running:
        step = running.pop(0)
        assert step is not None
        result = engine.collect(step)
        assert not result.failed
        done += [int(each.job.key) for each in result.done]
        if (launched := engine.launch()) is not None:
            running.append(launched)
    assert sorted(done) == [1, 2, 11, 12]
    for handle in (1, 2):
        engine.close(Handle(handle))
    assert (engine.memory().pages_used, engine.memory().slots_used) == (0, 0)
