"""Pool sizes: from the config or from a rank's share of its device, refused with numbers when they cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from mstar_core.engine.cache.sizing import (
    Budget,
    PoolPlan,
    PoolRequest,
    node_shares,
    plan_pool,
    rank_budget,
)
from mstar_core.engine.cuda_graphs.cache import GraphCache, StaticStep, sizes_for
from mstar_core.engine.device import check_device, free_bytes, limit_memory, resolve_device
from mstar_core.errors import ConfigError, StartError
from mstar_core.graph.declare.nodes import KVSpec

SPEC = KVSpec(layers=2, kv_heads=4, head_dim=8)
TOKEN_BYTES = 2 * 2 * 4 * 8 * 2
T = TypeVar("T")


def plan(
    request: PoolRequest, free: int = 1 << 20, longest: int = 64, spec: KVSpec = SPEC, most: int | None = None
) -> PoolPlan:
    return plan_pool(
        spec, request, node="LLM", dtype=torch.bfloat16, free_bytes=free, longest=longest, most_tokens=most
    )


def test_pages_and_tokens_fix_the_size() -> None:
    assert plan(PoolRequest(pages=10)).tokens == 160
    assert plan(PoolRequest(tokens=170)).pages == 11
    assert plan(PoolRequest(pages=10)).size_bytes == 160 * TOKEN_BYTES


def test_without_a_size_a_node_takes_all_that_it_is_given() -> None:
    assert plan(PoolRequest(), free=1 << 19).pages == (1 << 19) // (16 * TOKEN_BYTES)


def test_no_more_is_taken_than_can_be_used() -> None:
    assert plan(PoolRequest(), most=100).pages == 7


def test_the_page_of_a_node_overrides_the_deployments() -> None:
    assert plan(PoolRequest(pages=3), spec=KVSpec(layers=2, kv_heads=4, head_dim=8, page=258)).tokens == 774


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(StartError) as caught:
        plan(PoolRequest(pages=300))
    assert "300 pages" in caught.value.detail and "256 pages or fewer" in caught.value.hint
    with pytest.raises(StartError, match="smaller than one sequence"):
        plan(PoolRequest(pages=3))
    with pytest.raises(StartError, match="smaller than one sequence"):
        plan(PoolRequest(), free=1000)


@pytest.mark.parametrize(
    "request_", [PoolRequest(pages=1, tokens=1), PoolRequest(pages=0), PoolRequest(tokens=-1), PoolRequest(page_size=0)]
)
def test_contradictions_are_refused(request_: PoolRequest) -> None:
    with pytest.raises(ConfigError):
        plan(request_)


GIB = 1 << 30


def budget(**changes: float) -> Budget:
    sizes = {"total_bytes": 80 * GIB, "free_bytes": 70 * GIB, "weights_bytes": 7 * GIB, "reserve_bytes": 2 * GIB}
    fraction = changes.pop("fraction", 0.85)
    whole = {name: int(size) for name, size in {**sizes, **changes}.items()}
    return Budget(device="cuda:0", fraction=fraction, **whole)


def test_pools_get_the_ranks_share_less_weights_and_reserve() -> None:
    assert budget().check().pool_bytes == (68 - 9) * GIB
    assert budget(fraction=0.425).check().pool_bytes == (34 - 9) * GIB


def test_pools_leave_what_the_largest_steps_of_the_nodes_take() -> None:
    working = 6 * GIB
    less = budget(working_bytes=working).check()
    assert less.pool_bytes == budget().pool_bytes - working
    assert "7,168 MiB of weights, 2,048 MiB of reserve and 6,144 MiB of largest steps" in less.sum_text
    with pytest.raises(StartError, match="no memory is left"):
        budget(working_bytes=60 * GIB).check()


def test_two_ranks_on_one_device_never_count_on_more_than_it_has() -> None:
    one = budget(fraction=0.425)
    assert 2 * (one.pool_bytes + one.weights_bytes + one.reserve_bytes) <= one.total_bytes


def test_a_share_that_weights_and_reserve_exceed_is_refused_with_the_sizes() -> None:
    with pytest.raises(StartError, match="no memory is left") as caught:
        budget(fraction=0.1).check()
    assert "81,920 MiB" in caught.value.detail and "7,168 MiB of weights" in caught.value.detail
    assert "2,048 MiB of reserve" in caught.value.detail and "memory_fraction" in caught.value.hint


def test_memory_of_other_processes_is_not_counted_on() -> None:
    others = budget(free_bytes=33 * GIB).check()
    others.check_free(33 * GIB)  # a pool may be smaller than the share
    with pytest.raises(StartError, match="other processes use") as caught:
        others.check_free(others.pool_bytes)
    assert "33,792 MiB are free" in caught.value.detail and "0.50 of it" in caught.value.hint


def test_nodes_divide_what_is_left_evenly() -> None:
    assert node_shares(["a", "b", "c"], {"a": 0.5}) == {"a": 0.5, "b": 0.25, "c": 0.25}
    assert node_shares(["a"], {"elsewhere": 0.9}) == {"a": 1.0}
    assert node_shares(["a", "b"], {"a": 0.5, "b": 0.2}) == {"a": 0.5, "b": 0.2}


@pytest.mark.parametrize("declared", [{"a": 0.7, "b": 0.4}, {"a": 1.0}])
def test_shares_that_cannot_add_up_are_refused(declared: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.share"):
        node_shares(["a", "b"], declared)


def test_the_host_has_a_budget_and_the_cpu_computes() -> None:
    assert 0 < rank_budget(torch.device("cpu"), 0.5).check().pool_bytes <= 1 << 30
    check_device(resolve_device("cpu"))


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError):
        resolve_device("tpu")
    with pytest.raises(StartError, match="cuda:99"):
        resolve_device("cuda:99")


class OnDevice(GraphCache):
    """GraphCache on a device of which so much is free."""

    free = 9 * GIB

    def _free(self) -> int:
        return self.free

    def capture(self, step: Callable[[], T]) -> tuple[Any, T | None]:
        return None, None


class Nothing(StaticStep[int]):
    """A step that does nothing."""

    def forward(self) -> int:
        return 0


def test_nothing_is_captured_in_the_memory_that_the_largest_steps_need(caplog: pytest.LogCaptureFixture) -> None:
    cache = OnDevice(torch.device("cuda"), spare_bytes=8 * GIB)
    buckets = cache.buckets(lambda size: Nothing(), lambda size: f"step of {size[0]}")
    buckets.plan([(1,), (2,)])
    assert cache.capture_next()
    cache.free = 7 * GIB
    assert not cache.capture_next()
    assert buckets.sizes == [(1,)] and cache.counts.captured == 1
    assert "7168 MiB are free, and the largest steps may need 8192" in caplog.text


def test_a_start_without_memory_for_any_step_of_a_kind_fails_and_says_why() -> None:
    cache = OnDevice(torch.device("cuda"), spare_bytes=8 * GIB, name="LLM")
    cache.free = 7 * GIB
    cache.buckets(lambda size: Nothing(), lambda size: "step").plan([(1,)])
    with pytest.raises(StartError, match="captured steps of node LLM do not fit"):
        cache.capture_all()


@pytest.mark.parametrize("slots", [1, 5, 32, 64, 100, 300])
def test_decode_buckets_cover_every_number_of_slots(slots: int) -> None:
    """A decode batch always has a bucket from the start, whatever max_concurrent_requests an operator sets."""
    sizes = sizes_for(slots)
    assert max(sizes.decode) == slots and not set(sizes.decode) & set(sizes.decode_later)
    every = sorted(sizes.decode + sizes.decode_later)
    assert all(after <= 2 * before for before, after in itertools.pairwise(every))
    assert sizes_for(64).decode == (1, 8, 32, 64) and sizes_for(64).decode_later == (2, 4, 16, 24, 48)


def test_the_largest_bucket_of_prompts_is_captured_first() -> None:
    """Steps hold no more tokens than the largest captured bucket: 32 images waited for each other in steps of one."""
    sizes = sizes_for(64)
    assert max(sizes.prefill) > max(sizes.prefill_later) and not set(sizes.prefill) & set(sizes.prefill_later)


def test_a_budget_limits_what_the_process_may_take_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    total, free, reserved = 100 << 30, 90 << 30, 10 << 30
    shares = [1.0]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: shares[-1])
    device = torch.device("cuda", 0)
    limit_memory(device, None)
    assert shares == [1.0] and free_bytes(device) == free, "without a budget the whole device is there"
    limit_memory(device, 48 << 30)
    assert shares[-1] == pytest.approx(0.47), "less what PyTorch does not count"
    assert free_bytes(device) == pytest.approx(37 << 30), "of which 10 are taken"
    limit_memory(device, 1 << 30)
    assert shares[-1] == pytest.approx(0.0075), "three quarters of a small budget"
    limit_memory(torch.device("cpu"), 1 << 20)
    assert len(shares) == 3
