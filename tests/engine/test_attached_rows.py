"""Outputs that are kept beside cached pages: a job that wants them is skipped like any other, with equal values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.device_state.attached_rows import AttachedRows
from mstar_core.engine.device_state.page_store import PageStore
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.check.graph_check import check_graph
from mstar_core.graph.declare.nodes import CLIENT, Attachment, EngineHints, KVSpec
from mstar_core.graph.declare.walks import GraphEdge, GraphNode
from tests.engine.tiny_engine import LM, WIDTH, Driver, make_engine, prompt

assert LM.kv is not None
ATTACHED = replace(LM, kv=replace(LM.kv, attached=(Attachment("hidden", WIDTH),)))
BEFORE, MEDIA, AFTER, STEPS, PAGE = 10, 21, 9, 6, 4
"""Tokens of the parts; no page of four ends where a part does."""

FLOAT, CPU = torch.float32, torch.device("cpu")

Answer = tuple[list[int], list[Tensor], list[int]]
"""Ids, the wanted rows of each medium, and the tokens of each prompt job that the cache supplied."""


def media(seed: int) -> Tensor:
    return torch.randn(MEDIA, WIDTH, generator=torch.Generator().manual_seed(seed))


def submit(driver: Driver, handle: int, seeds: tuple[int, ...], *, wants: bool = True) -> tuple[list[int], int]:
    """Submit text, media with text behind each, and a decode loop. Returns the jobs of the prompt and the loop."""
    jobs = [driver.prefill(handle, prompt(1, BEFORE), outputs=(), sample=False, tokens_hash_seed=b"ids")]
    for number, seed in enumerate(seeds):
        outputs = ("hidden",) if wants else ()
        fields = {"outputs": outputs, "sample": False, "content": bytes([seed])}
        jobs.append(driver.submit(handle, inputs={"embeds": media(seed)}, **fields))
        is_last = number == len(seeds) - 1
        more = {} if is_last else {"outputs": (), "sample": False}
        jobs.append(driver.prefill(handle, prompt(20 + seed, AFTER), tokens_hash_seed=b"ids", **more))
    return jobs, driver.decode(handle, STEPS, tokens_hash_seed=b"ids")


def answer(driver: Driver, jobs: list[int], loop: int) -> Answer:
    done = [driver.done[job] for job in jobs]
    rows = [each.outputs["hidden"] for each in done if "hidden" in each.outputs]
    return [int(done[-1].outputs["token"]), *driver.ids[loop]], rows, [each.cached_tokens for each in done]


def ask(
    engine: KVCacheEngine, handle: int, seeds: tuple[int, ...], *, wants: bool = True, lookahead: int = 0
) -> Answer:
    driver = Driver(engine, lookahead, keys=100 * handle)
    driver.open(handle, max_tokens=90)
    jobs, loop = submit(driver, handle, seeds, wants=wants)
    driver.run()
    assert not driver.failed
    engine.close(Handle(handle))
    assert engine.memory().pages_used == 0
    return answer(driver, jobs, loop)


def made(**changes: object) -> KVCacheEngine:
    return make_engine(spec=ATTACHED, **changes)


def plain(seeds: tuple[int, ...]) -> Answer:
    return ask(make_engine(prefix_cache=False), 0, seeds)


def check(got: Answer, seeds: tuple[int, ...]) -> None:
    ids, rows, _ = plain(seeds)
    assert got[0] == ids and len(got[1]) == len(rows) == len(seeds)
    for mine, wanted in zip(got[1], rows, strict=True):
        # The last bits of a product depend on the number of its rows, so those of a chunk differ from a whole pass.
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [64, 8])
def test_rows_come_back_with_the_pages(budget: int, lookahead: int) -> None:
    engine = made(token_budget=budget, lookahead=lookahead)
    first = ask(engine, 1, (5,), lookahead=lookahead)
    check(first, (5,))
    assert first[2] == [0, 0, 0]
    second = ask(engine, 2, (5, 6), lookahead=lookahead)
    check(second, (5, 6))
    assert torch.equal(first[1][0], second[1][0])
    assert second[2][:2] == [BEFORE, MEDIA], "whole segments are skipped, though they end within pages"
    assert AFTER - PAGE < second[2][2] <= AFTER and second[2][3] < MEDIA
    third = ask(engine, 3, (5, 6), lookahead=lookahead)
    check(third, (5, 6))
    assert all(torch.equal(mine, before) for mine, before in zip(third[1], second[1], strict=True))
    assert third[2][:4] == [BEFORE, MEDIA, AFTER, MEDIA]


def test_rows_of_steps_of_fixed_shape() -> None:
    """The first pass of a kind is not of fixed shape; later ones are, as on a GPU, where they are captured."""
    fixed = replace(ATTACHED, hints=EngineHints(capture_prompts=(16, 64)))
    engine = make_engine(spec=fixed, graphs=CaptureSizes(decode=(1, 8, 16), prefill=(16, 64)))
    ask(engine, 1, (5,), wants=False)
    while engine.idle():
        pass
    before = engine.counters()["prefill_misses"]
    assert ask(engine, 2, (6, 7), wants=False)[1] == []
    assert engine.counters()["prefill_misses"] == before
    got = ask(engine, 3, (6, 7))
    check(got, (6, 7))
    assert got[2][:4] == [BEFORE, MEDIA, AFTER, MEDIA]


def test_a_request_that_did_not_want_rows_has_left_them() -> None:
    engine = made()
    assert ask(engine, 1, (5,), wants=False)[1] == []
    got = ask(engine, 2, (5,))
    check(got, (5,))
    assert got[2][1] == MEDIA


def test_without_the_attachment_a_job_that_wants_rows_is_computed() -> None:
    engine = make_engine()
    for handle in (1, 2):
        got = ask(engine, handle, (5,))
        check(got, (5,))
        assert got[2][1] == 0


def test_a_skipped_segment_costs_no_token() -> None:
    engine = made()
    ask(engine, 1, (5, 6))
    driver = Driver(engine, keys=1000)
    driver.open(2, max_tokens=90)
    submit(driver, 2, (5, 6))
    driver.run()
    total = BEFORE + 2 * (MEDIA + AFTER)
    assert sum(result.tokens for result in driver.results) <= STEPS + total - (total - AFTER) // PAGE * PAGE
    engine.close(Handle(2))


def test_preempted_requests_give_equal_rows() -> None:
    """A pool for one and a half of them: requests lose their pages, and find some of them again in the cache."""
    engine = made(num_pages=30, token_budget=16)
    driver = Driver(engine)
    asked = []
    for handle, seeds in ((1, (5, 6)), (2, (5, 6)), (3, (7, 6)), (4, (5, 8))):
        driver.open(handle, max_tokens=90)
        asked.append((submit(driver, handle, seeds), seeds))
    driver.run()
    assert not driver.failed and engine.memory().preempted > 0
    for (jobs, loop), seeds in asked:
        check(answer(driver, jobs, loop), seeds)
    for handle in (1, 2, 3, 4):
        engine.close(Handle(handle))
    for handle, seeds in ((5, (5, 6)), (6, (7, 6)), (7, (5, 8))):
        check(ask(engine, handle, seeds), seeds)


def test_evicted_pages_take_their_rows_with_them() -> None:
    engine = made(num_pages=24)
    ask(engine, 1, (5, 6))
    ask(engine, 2, (7, 8))  # takes the pages of the first
    got = ask(engine, 3, (5, 6))
    check(got, (5, 6))
    assert got[2][3] == 0


@contextmanager
def forked(engine: KVCacheEngine, handle: int, seed: int) -> Iterator[tuple[Driver, int, int, int]]:
    """Read a medium on the main branch, fork it within a page, and read another one on both. Yields the three jobs."""
    driver = Driver(engine, keys=100 * handle)
    driver.open(handle, max_tokens=180)
    fields = {"outputs": ("hidden",), "sample": False}
    first = driver.submit(handle, inputs={"embeds": media(seed)}, content=bytes([seed]), **fields)
    driver.run()
    engine.fork(Handle(handle), "main", "side")
    jobs = [
        driver.submit(handle, inputs={"embeds": media(other)}, content=bytes([other]), branch=branch, **fields)
        for branch, other in (("main", seed + 1), ("side", seed + 2))
    ]
    driver.run()
    yield driver, first, *jobs
    engine.close(Handle(handle))


def test_rows_follow_the_pages_of_a_fork() -> None:
    cached, fresh = made(), make_engine(prefix_cache=False)
    with forked(fresh, 1, 5) as (driver, *jobs):
        wanted = [driver.done[job].outputs["hidden"] for job in jobs]
    for handle in (1, 2):
        with forked(cached, handle, 5) as (driver, *jobs):
            done = [driver.done[job] for job in jobs]
            assert all(torch.equal(a.outputs["hidden"], b) for a, b in zip(done, wanted, strict=True))
            assert [each.cached_tokens for each in done] == [MEDIA * (handle - 1)] * 3
    assert cached.memory().pages_used == 0


def test_a_partly_adopted_page_is_copied_before_it_is_written() -> None:
    """Two requests share the start of a page and go on differently; the cached page keeps its content."""
    engine = made()
    ask(engine, 1, (5,))
    for handle, seeds in ((2, (5, 6)), (3, (5, 7)), (4, (5,)), (5, (5, 6))):
        check(ask(engine, handle, seeds), seeds)


def test_rows_are_saved_and_restored_with_their_pages() -> None:
    rows = AttachedRows(KVSpec(layers=1, kv_heads=1, head_dim=2, attached=(Attachment("x", 3),)), 6, PAGE, FLOAT, CPU)
    values = torch.randn(6, 3)
    store = PageStore([torch.zeros(6, 2, PAGE, 1, 2)], rows.pools)
    rows.write({"x": values, "y": values}, np.array([4, 1], dtype=np.int32), 1)
    store.save(1, [4, 1])
    rows.write({"x": -values}, np.array([4, 1], dtype=np.int32), 1)
    store.restore(1, [0, 5])
    assert torch.equal(rows.read("x", np.array([0, 5], dtype=np.int32), 1, 6), values)
    assert [group.shape[1] for group in store.gather([0, 5])] == [2], "rows stay on their rank"


def test_attached_rows_count_in_the_pool() -> None:
    kv = KVSpec(layers=48, kv_heads=4, head_dim=128, attached=(Attachment("states", 2048),))
    assert kv.bytes_per_token(2) == 96 * 1024 + 4096
    node = replace(ATTACHED, kv=KVSpec(layers=1, kv_heads=1, head_dim=8, attached=(Attachment("missing", 8),)))
    walk = GraphNode(node, ("tokens",), (GraphEdge("token", CLIENT, modality="text"),))
    problems = check_graph((node,), (), {"main": {"walk": walk}}, ())
    assert any("missing" in str(problem) for problem in problems)
