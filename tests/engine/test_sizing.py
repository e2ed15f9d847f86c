"""Pool sizes: from the config or from free memory, refused with numbers when they cannot be."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.device import check_device, resolve_device
from mstar_core.engine.sizing import PoolPlan, PoolRequest, free_memory, plan_pool
from mstar_core.errors import ConfigError, StartError
from mstar_core.graph.nodes import KVSpec

SPEC = KVSpec(layers=2, kv_heads=4, head_dim=8)
TOKEN_BYTES = 2 * 2 * 4 * 8 * 2


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


def test_a_fraction_takes_that_share_of_what_is_free() -> None:
    assert plan(PoolRequest(memory_fraction=0.5)).pages == (1 << 19) // (16 * TOKEN_BYTES)


def test_a_fraction_is_not_stretched_beyond_what_can_be_used() -> None:
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
    "request_", [PoolRequest(pages=1, tokens=1), PoolRequest(pages=0), PoolRequest(tokens=-1), PoolRequest(page_size=0),
                 PoolRequest(memory_fraction=0.0), PoolRequest(memory_fraction=1.5)],
)  # fmt: skip
def test_contradictions_are_refused(request_: PoolRequest) -> None:
    with pytest.raises(ConfigError):
        plan(request_)


def test_the_host_has_free_memory_and_the_cpu_computes() -> None:
    assert free_memory(torch.device("cpu")) > 0
    check_device(resolve_device("cpu"))


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError):
        resolve_device("tpu")
    with pytest.raises(StartError, match="cuda:99"):
        resolve_device("cuda:99")
