"""The speech model's golden vectors through the paged engine: logits, greedy ids, and every movement of pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import Driver, make_engine
from tests.runtime.golden import GOLDEN, LONG, PROMPTS, SHORT, Built, Golden

LOGITS = 1e-4
PENALTIES = (False, True)
PAGE = 8
MOST_TOKENS = len(GOLDEN.prompt(LONG)) + len(GOLDEN.greedy(LONG))
MOST_PAGES = -(-MOST_TOKENS // PAGE)
"""Tokens and pages of a request with the longest prompt."""


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.find()


@pytest.fixture(scope="module")
def built(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built.load(golden.lay_out(tmp_path_factory.mktemp("golden") / "checkpoint"))


def driver_of(built: Built, lookahead: int = 0, branches: tuple[str, ...] = ("main",), **changes: object) -> Driver:
    """Return a driver of the paged engine with the golden language model."""
    spec = built.spec.node("LLM")
    spec = replace(spec, kv=replace(spec.kv, branches=branches))
    rows = max(8, 3 * len(PROMPTS) + 1)
    sizes = {"num_pages": rows * (MOST_PAGES + 1), "page_size": PAGE, "max_slots": rows, "max_seq_len": 2 * MOST_TOKENS}
    settings = {**sizes, "lookahead": lookahead, **changes}
    return Driver(make_engine(spec=spec, module=built.llama, vocab=built.vocab, **settings), lookahead)


def sampling(is_penalised: bool) -> SamplingParams:
    return SamplingParams(repetition_penalty=GOLDEN.penalty if is_penalised else 1.0)


class Round:
    """Requests of one driver that continue golden prompts greedily."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._keys: dict[int, tuple[int, int]] = {}

    def add(self, golden: Golden, index: int, handle: int, *, is_penalised: bool = False, **fields: object) -> None:
        wanted = golden.greedy(index, is_penalised=is_penalised)
        self.driver.open(handle, sampling(is_penalised), len(golden.prompt(index)) + len(wanted))
        prefill = self.driver.prefill(handle, golden.prompt(index), **fields)
        self._keys[handle] = prefill, self.driver.decode(handle, len(wanted) - 1)

    def ids(self, handle: int) -> list[int]:
        first, loop = self._keys[handle]
        return [int(self.driver.done[first].outputs["token"]), *self.driver.ids[loop]]

    def cached(self, handle: int) -> int:
        return self.driver.done[self._keys[handle][0]].cached_tokens

    def run(self) -> None:
        self.driver.run()
        assert not self.driver.failed

    def close(self) -> None:
        for handle in self._keys:
            self.driver.engine.close(Handle(handle))
        memory = self.driver.engine.memory()
        assert (memory.pages_used, memory.slots_used) == (0, 0)


@pytest.mark.parametrize("budget", [7, 64], ids=["chunked", "whole"])
@pytest.mark.parametrize("batch", [(SHORT,), (LONG,), (SHORT, LONG, SHORT)], ids=str)
def test_prefill_logits(batch: tuple[int, ...], budget: int, golden: Golden, built: Built) -> None:
    driver = driver_of(built, token_budget=budget)
    keys = []
    for handle, index in enumerate(batch):
        driver.open(handle, max_tokens=MOST_TOKENS)
        keys.append(driver.prefill(handle, golden.prompt(index), outputs=("logits",), sample=False))
    driver.run()
    for key, index in zip(keys, batch, strict=True):
        logits: Tensor = driver.done[key].outputs["logits"]
        torch.testing.assert_close(logits, golden.lm[f"prefill_logits_{index}"], atol=LOGITS, rtol=0)


@pytest.mark.parametrize(
    ("batch", "lookahead"),
    [
        ((SHORT,), 0),
        ((LONG,), 0),
        ((LONG, SHORT, LONG, SHORT, SHORT), 0),
        ((LONG, SHORT, LONG, SHORT), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [5, 64], ids=["chunked", "whole"])
@pytest.mark.parametrize("is_penalised", PENALTIES, ids=["plain", "penalised"])
def test_greedy_ids(
    is_penalised: bool, batch: tuple[int, ...], budget: int, lookahead: int, golden: Golden, built: Built
) -> None:
    requests = Round(driver_of(built, lookahead, token_budget=budget))
    for handle, index in enumerate(batch):
        requests.add(golden, index, handle, is_penalised=is_penalised)
    requests.run()
    for handle, index in enumerate(batch):
        assert requests.ids(handle) == golden.greedy(index, is_penalised=is_penalised)
    requests.close()


def test_penalised_and_plain_requests_share_a_batch(golden: Golden, built: Built) -> None:
    requests = Round(driver_of(built))
    for handle, (index, is_penalised) in enumerate([(SHORT, True), (SHORT, False), (LONG, False), (LONG, True)]):
        requests.add(golden, index, handle, is_penalised=is_penalised)
    requests.run()
    assert [requests.ids(handle) for handle in range(4)] == [
        golden.greedy(SHORT, is_penalised=True),
        golden.greedy(SHORT),
        golden.greedy(LONG),
        golden.greedy(LONG, is_penalised=True),
    ]


@pytest.mark.parametrize("is_penalised", PENALTIES, ids=["plain", "penalised"])
def test_a_prefix_cache_hit_changes_no_id(is_penalised: bool, golden: Golden, built: Built) -> None:
    requests = Round(driver_of(built))
    for handle in range(3):
        for number, index in enumerate(PROMPTS):
            own = len(PROMPTS) * handle + number
            requests.add(golden, index, own, is_penalised=is_penalised, tokens_hash_seed=b"")
        requests.run()
    for number, index in enumerate(PROMPTS):
        handles = range(number, 3 * len(PROMPTS), len(PROMPTS))
        whole_pages = (len(golden.prompt(index)) - 1) // PAGE * PAGE
        assert [requests.cached(handle) for handle in handles] == [0, whole_pages, whole_pages]
        wanted = golden.greedy(index, is_penalised=is_penalised)
        assert all(requests.ids(handle) == wanted for handle in handles)
    requests.close()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("is_penalised", PENALTIES, ids=["plain", "penalised"])
def test_preemption_changes_no_id(is_penalised: bool, lookahead: int, golden: Golden, built: Built) -> None:
    # At their ends, two of the three long requests fit into the pool.
    requests = Round(driver_of(built, lookahead, num_pages=2 * MOST_PAGES + 2, token_budget=16, prefix_cache=False))
    batch = (LONG, SHORT, LONG, LONG)
    for handle, index in enumerate(batch):
        requests.add(golden, index, handle, is_penalised=is_penalised)
    requests.run()
    assert requests.driver.engine.memory().preempted > 0
    for handle, index in enumerate(batch):
        assert requests.ids(handle) == golden.greedy(index, is_penalised=is_penalised)
    requests.close()


@pytest.mark.parametrize("kept", [PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("index", PROMPTS)
def test_a_copy_on_write_fork_goes_on_like_its_source(index: int, kept: int, golden: Golden, built: Built) -> None:
    prompt, wanted = golden.prompt(index), golden.greedy(index)
    if len(prompt) <= kept:
        pytest.skip(f"runs when MSTAR_GOLDEN names a set with a prompt of more than {kept} tokens")
    driver = driver_of(built, branches=("main", "side"))
    driver.open(0, max_tokens=2 * (len(prompt) + len(wanted)))
    driver.prefill(0, prompt[:kept], sample=False)
    driver.run()
    driver.engine.fork(Handle(0), "main", "side")
    loops = {}
    for branch in ("main", "side"):
        first = driver.prefill(0, prompt[kept:], branch=branch)
        loops[branch] = first, driver.decode(0, len(wanted) - 1, branch=branch)
    driver.run()
    for first, loop in loops.values():
        assert [int(driver.done[first].outputs["token"]), *driver.ids[loop]] == wanted
    driver.engine.close(Handle(0))
    assert driver.engine.memory().pages_used == 0


@pytest.mark.parametrize("index", PROMPTS)
def test_step_logits(index: int, golden: Golden, built: Built) -> None:
    """Row s selected id s: the last row of the prefill, then one row for each id."""
    ids, expected = golden.greedy(index), golden.lm[f"greedy_step_logits_{index}"]
    driver = driver_of(built)
    driver.open(0, max_tokens=MOST_TOKENS)
    rows = [driver.prefill(0, golden.prompt(index), outputs=("logits",), sample=False)]
    rows += [driver.prefill(0, [token], outputs=("logits",), sample=False) for token in ids[:-1]]
    driver.run()
    logits = torch.stack([driver.done[key].outputs["logits"][-1] for key in rows])
    torch.testing.assert_close(logits, expected, atol=LOGITS, rtol=0)
    assert logits.argmax(1).tolist() == ids


def test_the_plain_path_of_these_tests_is_the_reference(golden: Golden, built: Built) -> None:
    for index in PROMPTS:
        for is_penalised in PENALTIES:
            wanted = golden.greedy(index, is_penalised=is_penalised)
            given = built.continued(golden.prompt(index), len(wanted), golden.penalty if is_penalised else 1.0)
            assert given == wanted


def test_the_checkpoint_folder_is_whole(golden: Golden, tmp_path: Path) -> None:
    folder = golden.lay_out(tmp_path / "checkpoint")
    assert Built.load(folder).stop_id == golden.json("config.json")["stop_token_id"]
