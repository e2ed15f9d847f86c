"""Requests at once, as the plan of `up` chooses them from the devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mstar_core.config.files.load import read_file
from mstar_core.config.files.resolution import resolve
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.host.hardware.gpus import Gpu
from mstar_core.plugin import ModelSpec
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.admission import (
    Admission,
    admission,
    quantized_share,
    weight_shares,
    weights_on_devices,
)
from mstarctl.start.target import find, parse_set, resolve_target
from tests.cli.life.test_gpus import GIB

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def configured(spec: ModelSpec, file: str, *given: str) -> ResolvedConfig:
    """Return a shipped file with these settings."""
    target = replace(find(file.removesuffix(".yaml"), Plugins.discover()), spec=spec)
    return resolve_target(target, [parse_set(each) for each in given])


def planned(model: str, file: str, sizes_gib: list[float], *given: str, weights: int | None = None) -> Admission:
    """Return the admission of a shipped file on GPUs of these sizes; given: settings. weights None: the declared."""
    plugins = Plugins.discover()
    spec: ModelSpec = plugins.model(model)
    config = configured(spec, file, *given)
    gpus = [Gpu(name="", driver="", free=0, total=int(size * GIB), uuid=f"GPU-{i}") for i, size in enumerate(sizes_gib)]
    keys = {f"cuda:{index}": gpu.uuid for index, gpu in enumerate(gpus)}
    plan = plugins.plan(spec, config, tuple(keys) or ("cpu",))
    needed = weights_on_devices(spec, plan, config) if weights is None else weights
    return admission(spec, config, plan, keys, gpus, needed)


@pytest.mark.parametrize(("sizes_gib", "expected"), [([], 32), ([24], 32), ([80], 64), ([141], 128), ([0], 32)])
def test_requests_at_once_follow_the_gpu(sizes_gib: list[float], expected: int) -> None:
    assert planned("orpheus", "orpheus_colocated.yaml", sizes_gib).max_concurrent_requests == expected


def test_the_smallest_gpu_decides() -> None:
    assert planned("orpheus", "orpheus_replicas.yaml", [141, 80]).max_concurrent_requests == 64


def test_caches_that_hold_fewer_usual_requests_admit_fewer_and_the_reason_is_given() -> None:
    roomy = planned("bagel", "bagel_single_gpu.yaml", [140])
    narrow = planned("bagel", "bagel_single_gpu.yaml", [48])
    assert roomy.max_concurrent_requests == 128 and narrow.max_concurrent_requests < 32
    assert "48.0 GiB" in narrow.why and "usual requests" in narrow.why


def test_weights_of_eight_bits_leave_room_for_more_requests() -> None:
    plain = planned("bagel", "bagel_single_gpu.yaml", [48])
    halved = planned("bagel", "bagel_single_gpu.yaml", [48], "quantization=fp8")
    assert plain.max_concurrent_requests < halved.max_concurrent_requests


def test_weights_under_a_quantization_are_those_of_the_quantized_layers() -> None:
    """Embeddings, heads and encoders keep their size; a node without declared parts is halved, the least."""
    plugins = Plugins.discover()
    for model, file, whole, halved in (
        ("qwen3_omni", "qwen3omni_single_gpu.yaml", 71.1e9, 38.0e9),
        ("bagel", "bagel_single_gpu.yaml", 29.7e9, 16.6e9),
        ("orpheus", "orpheus_colocated.yaml", 6.68e9, 3.38e9),
    ):
        spec = plugins.model(model)
        for setting, expected in (("none", whole), ("fp8", halved)):
            config = configured(spec, file, f"quantization={setting}")
            plan = plugins.plan(spec, config, ("cuda:0",))
            needed = weights_on_devices(spec, plan, config)
            assert needed == pytest.approx(expected, rel=0.005), (model, setting)
            assert quantized_share(spec, plan, setting) == pytest.approx(expected / whole, rel=0.005)


def test_a_rank_is_charged_with_the_weights_of_its_own_nodes() -> None:
    """The Thinker alone fills most of a GPU of 76 GiB; the Talker's GPU is nearly empty."""
    both = planned("qwen3_omni", "qwen3omni_2gpu.yaml", [76, 76])
    large = planned("qwen3_omni", "qwen3omni_2gpu.yaml", [141, 76])
    assert both.max_concurrent_requests < large.max_concurrent_requests == 64


def test_ranks_of_a_group_divide_its_weights() -> None:
    plugins = Plugins.discover()
    spec = plugins.model("qwen3_omni")
    plan = plugins.plan(
        spec, resolve(spec, read_file(ROOT / "configs" / "qwen3omni_tp2.yaml")), ("cuda:0", "cuda:1", "cuda:2")
    )
    share = weight_shares(spec, plan)
    assert share[1] == pytest.approx(spec.node("Thinker").weight_bytes / 2 / 71_142_000_000, rel=0.01)
    assert sum(share.values()) == pytest.approx(1)


def test_an_unknown_size_of_the_weights_leaves_the_number_to_the_device() -> None:
    assert planned("bagel", "bagel_single_gpu.yaml", [48], weights=0).max_concurrent_requests == 32


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_files_leave_the_number_to_the_device(path: Path) -> None:
    assert "max_concurrent_requests" not in path.read_text(encoding="utf-8")
