"""Prefix cache over media: a prompt of text, an image and text again reuses what is equal, across its three jobs."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.kv.engine import KVCacheEngine
from tests.engine.tiny_engine import WIDTH, Driver, make_engine, prompt

BEFORE, MEDIA, AFTER, STEPS = 10, 21, 9, 6
"""Tokens of the parts; no page of four ends where a part does."""


def image(seed: int) -> torch.Tensor:
    return torch.randn(MEDIA, WIDTH, generator=torch.Generator().manual_seed(seed))


def ask(
    engine: KVCacheEngine, handle: int, media: int, after: int, *, content: bytes | None, lookahead: int = 0
) -> tuple[list[int], int]:
    """Run one request. Returns its ids, and the tokens that the cache supplied. media, after: seeds of the parts."""
    driver = Driver(engine, lookahead, keys=100 * handle)
    driver.open(handle)
    jobs = [driver.prefill(handle, prompt(1, BEFORE), outputs=(), sample=False, tokens_hash_seed=b"ids")]
    jobs.append(driver.submit(handle, inputs={"embeds": image(media)}, outputs=(), sample=False, content=content))
    jobs.append(driver.prefill(handle, prompt(after, AFTER), tokens_hash_seed=b"ids"))
    loop = driver.decode(handle, STEPS)
    driver.run()
    assert not driver.failed
    engine.close(Handle(handle))
    return [int(driver.done[jobs[-1]].outputs["token"]), *driver.ids[loop]], sum(
        driver.done[job].cached_tokens for job in jobs
    )


def wanted(media: int, after: int) -> list[int]:
    return ask(make_engine(prefix_cache=False), 0, media, after, content=None)[0]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [64, 8])
def test_equal_media_behind_equal_text_are_computed_once(lookahead: int, budget: int) -> None:
    engine = make_engine(token_budget=budget, lookahead=lookahead)
    assert ask(engine, 1, 5, 2, content=b"five", lookahead=lookahead) == (wanted(5, 2), 0)
    ids, cached = ask(engine, 2, 5, 2, content=b"five", lookahead=lookahead)
    assert ids == wanted(5, 2) and cached >= BEFORE + MEDIA - 4 and cached < BEFORE + MEDIA + AFTER
    ids, cached = ask(engine, 3, 5, 3, content=b"five", lookahead=lookahead)
    assert ids == wanted(5, 3) and cached >= BEFORE + MEDIA - 2 * 4, "another question about the same image"
    assert engine.memory().pages_used == 0


def test_other_media_of_equal_length_are_not_taken_for_it() -> None:
    engine = make_engine()
    ask(engine, 1, 5, 2, content=b"five")
    ids, cached = ask(engine, 2, 6, 2, content=b"six")
    assert ids == wanted(6, 2) and cached <= BEFORE


def test_media_without_a_content_key_end_the_prefix() -> None:
    engine = make_engine()
    for handle in (1, 2):
        ids, cached = ask(engine, handle, 5, 2, content=None)
        assert ids == wanted(5, 2) and cached <= BEFORE


def test_two_requests_at_once_share_pages_and_leave_nothing() -> None:
    engine = make_engine()
    ask(engine, 1, 5, 2, content=b"five")
    driver = Driver(engine, keys=1000)
    loops = []
    for handle, after in ((2, 2), (3, 3), (4, 2)):
        driver.open(handle)
        driver.prefill(handle, prompt(1, BEFORE), outputs=(), sample=False, tokens_hash_seed=b"ids")
        driver.submit(handle, inputs={"embeds": image(5)}, outputs=(), sample=False, content=b"five")
        first = driver.prefill(handle, prompt(after, AFTER), tokens_hash_seed=b"ids")
        loops.append((first, driver.decode(handle, STEPS), after))
    driver.run()
    for first, loop, after in loops:
        assert [int(driver.done[first].outputs["token"]), *driver.ids[loop]] == wanted(5, after)
    for handle in (2, 3, 4):
        engine.close(Handle(handle))
    assert engine.memory().pages_used == 0
