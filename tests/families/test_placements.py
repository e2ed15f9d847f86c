"""Every shipped deployment file serves all samples of its model with the answers of one rank, in one process.

Real conductor, workers, engines and tensor transports; `tests/runtime` has the same with processes.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml

from mstar_core.config.deployment import Plan
from mstar_core.config.files.load import read_file
from mstar_core.config.files.placement import make_plan
from mstar_core.config.files.resolution import resolve
from mstar_core.conformance.equality import require_equal
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime, ended
from mstar_core.conformance.samples import greedy, mixed
from mstar_core.messages.tensors import ShmTensor
from mstar_core.worker.incoming.blobs import BlobReads
from mstar_core.worker.incoming.reads import Incoming
from mstar_core.worker.peer_memory.transport import PeerMemory
from tests.fakes.shared_memory import SharedMemory
from tests.families.families import ROOT, SPECS

FILES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "_tp2" not in path.stem]
"""All files but those of tensor parallelism, which tests of their own serve."""

SHORT = {"max_output_tokens": 10}


@functools.lru_cache(maxsize=1)
def small_of(model: str) -> Miniature:
    return Miniature(SPECS[model])


def placed(path: Path) -> tuple[Miniature, Plan]:
    """Return the model's miniature and the file's placement."""
    model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    small = small_of(model)
    return small, make_plan(small.spec, resolve(SPECS[model], read_file(path)), ("cpu",))


def by_model(paths: Sequence[Path]) -> list[Path]:
    """Order files by model, because one miniature is kept at a time."""
    models = {path: yaml.safe_load(path.read_text(encoding="utf-8"))["model"] for path in paths}
    return sorted(paths, key=lambda path: (models[path], path.stem))


MOVING = ("_pd_", "cfg_parallel")
"""Parts of the names of files in which caches move."""


def assert_answers_of_one_rank(small: Miniature, runtime: LocalRuntime, plan: Plan) -> None:
    asks = [greedy(small.spec, ask) for ask in small.asks]
    for ask, outcome in zip(asks, runtime.ask(*asks), strict=True):
        assert outcome.status == "finished", f"{ask.name}: {outcome.cause}"
        require_equal(small.alone(ask), outcome, f"{ask.name} on {len(plan.ranks)} ranks")
    assert runtime.leaks() == []


@pytest.mark.parametrize("path", by_model(FILES), ids=lambda path: path.stem)
def test_a_file_gives_the_answers_of_one_rank(path: Path) -> None:
    small, plan = placed(path)
    runtime = small.runtime(plan=plan)
    assert_answers_of_one_rank(small, runtime, plan)
    moved = sum(worker.executor.moves.received for worker in runtime.workers)
    assert (moved > 0) == any(part in path.stem for part in MOVING)
    assert moved == sum(worker.executor.moves.sent for worker in runtime.workers)


@pytest.mark.parametrize("late", [("worker-0", "worker-1"), ("conductor", "worker-1")], ids=["cache", "run"])
@pytest.mark.parametrize("name", ["orpheus_pd_disaggregated", "bagel_pd_disaggregated"])
def test_answers_do_not_depend_on_which_message_is_first(name: str, late: tuple[str, str]) -> None:
    small, plan = placed(ROOT / "configs" / f"{name}.yaml")
    assert_answers_of_one_rank(small, small.runtime(plan=plan, slow=[late]), plan)


@pytest.mark.parametrize("pages", [None, 24], ids=["plenty", "few pages"])
def test_a_thousand_requests_with_random_cancels_leave_nothing(pages: int | None) -> None:
    small, plan = placed(ROOT / "configs" / "orpheus_pd_disaggregated.yaml")
    runtime = small.runtime(RuntimeSettings(pages=pages, page_size=4), plan=plan)
    chance = random.Random(18)
    asks = [greedy(small.spec, ask) for ask in mixed(small.spec, 20)]
    total, calls, sent = 1000 if pages is None else 200, [], 0
    while sent < total or runtime.api.calls:
        while sent < total and len(runtime.api.calls) < 12:
            calls.append(runtime.send(replace(asks[sent % len(asks)], params={**asks[0].params, **SHORT})))
            sent += 1
        if chance.random() < 0.3:
            runtime.cancel(chance.choice(list(runtime.api.calls.values())))
        runtime.step()
    runtime.run()
    found = Counter(ended(call).status for call in calls)
    assert set(found) == {"finished", "cancelled"} and min(found.values()) > total / 10, found
    assert runtime.leaks() == []
    assert (pages is None) or sum(worker.runners["LLM"].memory().preempted for worker in runtime.workers) > 0
    moves = [worker.executor.moves for worker in runtime.workers]
    assert moves[0].sent >= moves[1].received > found["finished"] * 0.9


def through_devices(shared: SharedMemory) -> Callable[[str, Collection[str]], PeerMemory]:
    return lambda name, peers: PeerMemory(name, 1, shared.end(), peers, least_bytes=0)


@pytest.mark.parametrize("name", ["orpheus_pd_disaggregated", "bagel_cfg_parallel", "qwen3omni_pd_disaggregated"])
def test_answers_through_device_memory_equal_those_through_the_host(name: str) -> None:
    small, plan = placed(ROOT / "configs" / f"{name}.yaml")
    shared = SharedMemory(1 << 34, polls=3)
    runtime = small.runtime(plan=plan, peer_memory=through_devices(shared))
    assert_answers_of_one_rank(small, runtime, plan)
    sent = [memory.sent_bytes for worker in runtime.workers if (memory := worker.peer_memory) is not None]
    assert sum(sent) > 0
    assert sum(sent) == sum(worker.peer_memory.received_bytes for worker in runtime.workers if worker.peer_memory)


def test_a_tensor_that_cannot_be_read_fails_its_request_with_the_cause() -> None:
    small, plan = placed(ROOT / "configs" / "orpheus_pd_disaggregated.yaml")
    shared = SharedMemory(1 << 34, polls=2, bad_reads=1)
    runtime = small.runtime(plan=plan, peer_memory=through_devices(shared))
    asks = [greedy(small.spec, ask) for ask in small.asks[:1] * 3]
    outcomes = runtime.ask(*asks)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished", "finished"]
    assert "cannot be shared" in outcomes[0].cause and "a bad link" in outcomes[0].cause
    assert runtime.leaks() == []


def over_hosts(plan: Plan) -> Plan:
    """Return a plan with every rank but the first on a host of its own."""
    ranks = [msgspec.structs.replace(rank, host=f"host-{rank.rank}" if rank.rank else "") for rank in plan.ranks]
    return msgspec.structs.replace(plan, ranks=tuple(ranks))


@pytest.mark.parametrize("name", ["orpheus_pd_disaggregated", "bagel_cfg_parallel", "qwen3omni_pd_disaggregated"])
def test_answers_over_hosts_equal_those_of_one_rank(name: str) -> None:
    small, plan = placed(ROOT / "configs" / f"{name}.yaml")
    runtime = small.runtime(plan=over_hosts(plan))
    assert_answers_of_one_rank(small, runtime, plan)
    assert sum(reads.received_bytes for reads in blob_reads(runtime)) > 0
    assert not any(worker.executor.moves.transfer_s for worker in runtime.workers), "their clocks are not compared"


def blob_reads(runtime: LocalRuntime) -> list[BlobReads]:
    incoming = [worker.incoming for worker in runtime.workers]
    return [kind for each in incoming if isinstance(each, Incoming) for kind in each.kinds if type(kind) is BlobReads]


def test_an_input_that_cannot_be_fetched_fails_its_request_with_the_cause() -> None:
    small, plan = placed(ROOT / "configs" / "orpheus_pd_disaggregated.yaml")
    ranks = tuple(msgspec.structs.replace(rank, host="far") for rank in plan.ranks)
    runtime = small.runtime(plan=msgspec.structs.replace(plan, ranks=ranks))
    calls = [runtime.send(greedy(small.spec, ask)) for ask in small.asks[:1] * 2]
    for ref in calls[0].lent:
        assert isinstance(ref, ShmTensor) and runtime.transports["api"].release(ref.slot, ref.generation)
    runtime.run()
    first, second = map(ended, calls)
    assert (first.status, second.status) == ("failed", "finished"), second.cause
    assert "loan of a tensor ended" in first.cause
    assert runtime.leaks() == []
