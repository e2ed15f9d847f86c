"""The references of Pi0.5 and V-JEPA 2 through both engines on the CPU, with graphs that record; tests/gpu is CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.families.policy import Place
from mstar_core.engine.cuda_graphs.cache import GraphCache
from tests.engine.golden_engines import (
    BFLOAT16,
    FLOAT32,
    check_clips,
    check_policy,
    check_world,
    clip_encoder,
    observations,
    policy,
    world,
)
from tests.engine.recorded import RecordingCache

CPU = torch.device("cpu")
KINDS = [(torch.float32, "float32", FLOAT32), (torch.bfloat16, "bfloat16", BFLOAT16)]


@pytest.fixture
def made() -> list[RecordingCache]:
    return []


@pytest.fixture
def graphs(made: list[RecordingCache]) -> Callable[[], GraphCache]:
    def make() -> GraphCache:
        made.append(RecordingCache())
        return made[-1]

    return make


@pytest.mark.parametrize(("dtype", "vision", "limits"), KINDS, ids=["float32", "bfloat16"])
def test_actions(dtype: torch.dtype, vision: str, limits: Any, tmp_path: Path, graphs: Any, made: Any) -> None:
    place = Place(device=CPU, dtype=dtype, vision=vision, max_tokens=128, requests=4)
    acting = policy(place, tmp_path, graphs)
    check_policy(acting, limits)
    for node, counters in acting.counters().items():
        assert counters["graph_hits"] >= 3, node
    assert sum(graph.replays for captures in made for graph in captures.graphs) >= 6


def test_what_cameras_gave_stays_when_the_next_ones_are_seen(tmp_path: Path, graphs: Any) -> None:
    acting = policy(Place(device=CPU, dtype=torch.float32, max_tokens=128, requests=4), tmp_path, graphs)
    cameras, seen = acting.modules["vit_encoder"], observations()[0][0]
    images, tokens = seen.images[None], [torch.zeros(len(seen.images) * acting.sizes.vision.tokens + 3)]
    with torch.inference_mode():
        plain = cameras(images=images, tokens=tokens)["features"][0]
        acting.driver.capture()
        (kept,) = cameras(images=images, tokens=tokens)["features"]
        cameras(images=1 - images, tokens=tokens)
    torch.testing.assert_close(kept, plain)


@pytest.mark.parametrize(("dtype", "limits"), [KINDS[0][::2], KINDS[1][::2]], ids=["float32", "bfloat16"])
def test_rollouts(dtype: torch.dtype, limits: Any, tmp_path: Path, graphs: Any) -> None:
    rolling = world(Place(device=CPU, dtype=dtype, requests=8), tmp_path, graphs)
    check_world(rolling, limits)
    for node, counters in rolling.counters().items():
        assert counters["graph_hits"] >= 2, node


@pytest.mark.parametrize(("dtype", "limits"), [KINDS[0][::2], KINDS[1][::2]], ids=["float32", "bfloat16"])
def test_clips(dtype: torch.dtype, limits: Any, tmp_path: Path) -> None:
    place = Place(device=CPU, dtype=dtype)
    check_clips(clip_encoder(place, tmp_path), place, limits, GraphCache(CPU))
