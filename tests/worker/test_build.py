"""Construction of a rank: dtypes, pools within its share, and their description."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
import torch

from mstar_core.config.deployment import DeploymentSpec, Plan, RankPlan
from mstar_core.config.resolved import KVCacheConfig
from mstar_core.engine.attention.flashinfer import import_library
from mstar_core.engine.cache.sizing import CPU_POOL_BYTES
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache
from mstar_core.errors import ConfigError, StartError
from mstar_core.graph.declare.nodes import KV_CACHE, STATELESS, KVSpec, NodeSpec, Sampling
from mstar_core.worker.start.build import (
    attention_of,
    capture_planned,
    compute_dtype,
    fitting,
    pool_plans,
    preload,
    quantized_alone,
    quantized_text,
)
from tests.engine.tiny_engine import make_engine

if TYPE_CHECKING:
    from mstar_core.process.life import ChildLife

CPU = torch.device("cpu")


def node(name: str) -> NodeSpec:
    kv = KVSpec(layers=16, kv_heads=8, head_dim=128)
    ports = {"tokens": "i64[n]", "token": "i64[1]"}
    return NodeSpec(name=name, engine=KV_CACHE, ports=ports, kv=kv, sampling=Sampling(port="token"))


def spec(**cache: object) -> DeploymentSpec:
    return DeploymentSpec(
        name="d",
        model="m",
        plugin="p",
        run_dir="/r",
        log_dir="/l",
        plan=Plan(ranks=(), placements=()),
        max_seq_len=64,
        max_concurrent_requests=4096,
        kv_cache=KVCacheConfig(**cache),  # type: ignore[arg-type]
    )


def pools(fraction: float | None, *names: str, **cache: object) -> dict[str, int]:
    rank = RankPlan(rank=0, device="cpu", nodes=names, memory_fraction=fraction)
    plans = pool_plans(spec(**cache), rank, [node(name) for name in names], CPU, torch.float32)
    return {name: plan.size_bytes for name, plan in plans.items()}


def test_the_nodes_of_a_rank_divide_its_share() -> None:
    page = node("a").kv.bytes_per_token(4) * 16  # type: ignore[union-attr]
    found = pools(0.25, "a", "b", share={"a": 0.75})
    assert found["a"] == pytest.approx(0.75 * 0.25 * CPU_POOL_BYTES, abs=page)
    assert found["b"] == pytest.approx(0.25 * 0.25 * CPU_POOL_BYTES, abs=page)


def test_without_a_plans_share_the_deployments_holds_and_the_reserve_is_kept() -> None:
    page = node("a").kv.bytes_per_token(4) * 16  # type: ignore[union-attr]
    whole = pools(None, "a", memory_fraction=0.5)["a"]
    assert whole == pytest.approx(0.5 * CPU_POOL_BYTES, abs=page)
    assert pools(None, "a", memory_fraction=0.5, reserve_bytes=1 << 29)["a"] == pytest.approx(
        whole - (1 << 29), abs=page
    )
    with pytest.raises(StartError, match="no memory is left"):
        pools(0.2, "a", reserve_bytes=1 << 30)


def test_a_limited_rank_leaves_what_caches_leave_of_a_device() -> None:
    rank = RankPlan(rank=0, device="cpu", nodes=("LLM",), memory_bytes=1 << 30)
    sizes = []
    for limited in (False, True):
        made = msgspec.structs.replace(spec(reserve_bytes=0), memory_limit=limited)
        sizes.append(pool_plans(made, rank, [node("LLM")], CPU, torch.float32)["LLM"].size_bytes)
    page = 16 * 16 * 8 * 128 * 2 * 4
    assert sizes[0] <= 1 << 30 < sizes[0] + page, "the whole budget"
    assert sizes[1] <= 0.85 * (1 << 30) < sizes[1] + page, "the share of it that caches take of a device"


def test_dtypes_and_attention_follow_the_device() -> None:
    wide = KVSpec(layers=1, kv_heads=1, head_dim=64)
    assert compute_dtype(None, CPU) is torch.float32 and attention_of(spec(), CPU, wide) == "torch"
    assert compute_dtype(None, torch.device("cuda")) is torch.bfloat16
    cuda = torch.device("cuda")
    assert attention_of(spec(), cuda, wide) == "flashinfer"
    assert attention_of(spec(), cuda, replace(wide, head_dim=32)) == "torch"
    assert compute_dtype("float16", CPU) is torch.float16  # what the file says goes before the device
    assert attention_of(msgspec.structs.replace(spec(), attention="torch"), cuda, wide) == "torch"
    with pytest.raises(ConfigError, match="bfloat17"):
        compute_dtype("bfloat17", CPU)


def test_a_module_that_is_missing_disturbs_no_preload() -> None:
    thread = preload(("no_such_module_anywhere", "json"))
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed here")
def test_a_missing_attention_library_is_named_with_its_package() -> None:
    with pytest.raises(StartError, match="package flashinfer-python is missing") as caught:
        import_library()
    assert "pip install flashinfer-python" in caught.value.hint


@dataclass(frozen=True)
class Kind:
    output_error_mean: float = 0.025
    output_error_worst: float = 0.031


@dataclass(frozen=True)
class Report:
    method: str = "fp8"
    before_bytes: int = 4 << 30
    after_bytes: int = 2 << 30
    kinds: dict[str, Kind] = field(default_factory=lambda: {"q_proj": Kind()})


def test_a_quantization_is_reported_in_one_line() -> None:
    assert quantized_text(Report()) == (
        "fp8 weights: 4,096 MiB to 2,048 MiB; outputs differ by q_proj 0.0250 (worst 0.0310)"
    )


def test_nodes_with_a_cache_are_quantized_layer_by_layer_on_a_gpu() -> None:
    encoder = NodeSpec(name="encoder", engine=STATELESS, weight_bytes=1 << 30)
    decoder = NodeSpec(name="LLM", engine=KV_CACHE, kv=KVSpec(layers=1, kv_heads=1, head_dim=8), weight_bytes=60 << 30)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert quantized_alone(msgspec.structs.replace(spec(), quantization="fp8"), [encoder, decoder], gpu) == {"LLM"}
    assert quantized_alone(msgspec.structs.replace(spec(), quantization="fp8"), [encoder, decoder], cpu) == frozenset()
    assert quantized_alone(spec(), [encoder, decoder], gpu) == frozenset()


def test_weights_that_do_not_fit_a_gpu_end_the_start_with_the_sizes() -> None:
    shortage = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nIf reserved memory is large")
    budgeted = RankPlan(rank=0, device="cuda:0", nodes=("LLM",), memory_bytes=20 << 30)
    with (
        pytest.raises(StartError, match=r"do not fit its memory budget of 20,480 MiB") as found,
        fitting(budgeted, budgeted.memory_bytes),
    ):
        raise shortage
    assert found.value.detail == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "memory_budget" in found.value.hint and "fp8" in found.value.hint
    with (
        pytest.raises(StartError, match="do not fit cuda:0"),
        fitting(budgeted, None),  # a budget without memory_limit holds no weights back
    ):
        raise shortage


def test_a_full_warm_up_captures_all_that_is_planned() -> None:
    """The later sizes are captured before the start ends, and each is reported with what is left."""
    sizes = CaptureSizes(decode=(1,), decode_later=(2, 4), prefill=(16,), prefill_later=(32,))
    engine = make_engine(graphs=sizes, captures=GraphCache(torch.device("cpu")))
    assert engine.counters()["graphs_planned"] > 0
    phases: list[tuple[int, int]] = []
    life = SimpleNamespace(phase=lambda name, done, total, detail: phases.append((done, total)))
    capture_planned({"LM": engine}, cast("ChildLife", life))
    assert engine.counters()["graphs_planned"] == 0
    total = int(engine.counters()["graphs_captured"])
    assert phases == [(done, total) for done in range(phases[0][0], total)]
