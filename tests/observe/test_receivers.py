"""Receivers of values that cross ranks, in the graph of a model whose guidance branches have ranks of their own."""

from __future__ import annotations

import pytest

from mstar_core.observe.frames import EdgeView, GraphView, NodeView
from mstar_core.observe.receivers import receiver

LOOP = ["denoise"]
GRAPH = GraphView(
    nodes=[
        NodeView(name="LLM", replicas=[[0]], loops=["decode", *LOOP]),
        NodeView(name="LLM_cfg_text", replicas=[[0], [1]], loops=LOOP),
        NodeView(name="LLM_cfg_img", replicas=[[0], [2]], loops=LOOP),
        NodeView(name="combine_cfg", replicas=[[0]], loops=LOOP),
        NodeView(name="codec", replicas=[[3]]),
    ],
    edges=[
        EdgeView(name="velocity", source="LLM_cfg_text", into="combine_cfg"),
        EdgeView(name="latents", source="combine_cfg", into="vae_decoder"),
    ],
)


@pytest.mark.parametrize(
    ("name", "source", "rank", "expected"),
    [
        ("velocity", "LLM_cfg_text", 0, "combine_cfg"),
        ("latents", "LLM", 1, "LLM_cfg_text"),
        ("latents", "LLM", 2, "LLM_cfg_img"),
        ("ids", "LLM", 3, "codec"),
        ("ids", "LLM", 7, ""),
    ],
)
def test_a_link_has_a_target(name: str, source: str, rank: int, expected: str) -> None:
    """An edge of the graph, else a node of the same loop, else the only node of the rank."""
    assert receiver(GRAPH, name, source, rank) == expected
