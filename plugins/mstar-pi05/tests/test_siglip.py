"""The captured image tower equals the uncaptured one. Real captures are in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_pi05.nodes.siglip import CAPTURED


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_cameras_by_graphs_equal_plain_ones(golden: Any, models: Any, reference: Any, kind: torch.dtype) -> None:
    cameras = models(reference.folder).cameras()
    images = golden.images(0)[None].expand(2, -1, -1, -1, -1)
    images = ((images + 1) * 127.5).round().to(torch.uint8) if kind == torch.uint8 else images
    plain = reference.cameras.encode(images)
    assert not cameras.idle() and cameras.counters() == {}
    cameras.capture(GraphCache(torch.device("cpu")))
    cameras.encode(images)
    while cameras.idle():
        pass
    torch.testing.assert_close(cameras.encode(images), plain, atol=1e-6, rtol=1e-5)
    counters = cameras.counters()
    assert counters["graphs_captured"] == len(CAPTURED) and counters["graph_hits"] == counters["graph_misses"] == 1


def test_rounding_lasts_no_longer_than_the_tower(golden: Any, reference: Any) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    reference.cameras.encode(golden.images(0)[None])
    assert torch.backends.cuda.matmul.allow_tf32 == before
