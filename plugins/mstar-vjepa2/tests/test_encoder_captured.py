"""The captured encoder equals the uncaptured one. Real captures are in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_vjepa2.nodes import blocks, rotary
from mstar_vjepa2.nodes.encoder import CAPTURED, MOST_TOKENS

from .conftest import Golden, build, gap


def test_clips_by_graphs_equal_plain_ones(base: Golden, base_nodes: dict[str, Any], base_folder: Path) -> None:
    node, pixels = build("vjepa2", base_folder)["video_encoder"], base.given["pixel_values_videos"]
    with torch.inference_mode():
        plain = base_nodes["video_encoder"](pixel_values_videos=pixels)["encoder_hidden"]
        assert not node.idle() and node.counters() == {}
        node.encoder.capture(GraphCache(torch.device("cpu")))
        node(pixel_values_videos=pixels)
        while node.idle():
            pass
        assert gap(node(pixel_values_videos=pixels)["encoder_hidden"], plain) < 1e-6
        # Requested block outputs run uncaptured.
        assert gap(node.encoder(pixels, (1,))[0], plain) < 1e-6
    counters = node.counters()
    assert counters["graphs_captured"] == len(CAPTURED) and counters["graph_hits"] == counters["graph_misses"] == 1


def test_long_clips_are_not_captured(base: Golden, base_folder: Path) -> None:
    """64 frames of 256 x 256 are 8,192 patches."""
    encoder = build("vjepa2", base_folder)["video_encoder"].encoder
    patch, tubelet = encoder.config.patch, encoder.config.tubelet
    clip = (1, 32 * tubelet, 3, 16 * patch, 16 * patch)
    assert encoder._tokens(clip) == 8192 > MOST_TOKENS == encoder._tokens((16, 1, *clip[2:]))


def test_nodes_can_be_warmed_before_the_first_request(
    base_nodes: dict[str, Any], ac_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node's warm-up reaches the rotary kernel, which a GPU compiles at first use."""
    turned: list[torch.Size] = []
    monkeypatch.setattr(blocks, "rotate", lambda x, rotation: turned.append(x.shape) or rotary.rotate(x, rotation))
    for nodes, name in (
        (base_nodes, "video_encoder"),
        (base_nodes, "predictor"),
        (ac_nodes, "video_encoder"),
        (ac_nodes, "ac_predictor"),
    ):
        turned.clear()
        with torch.inference_mode():
            nodes[name].warm_up()
        assert turned, name
