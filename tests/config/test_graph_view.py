"""Graph of watch frames: modalities and chunk policies of its edges."""

from __future__ import annotations

import pytest

from mstar_core.config.graph_view import chunk_text, graph_of, input_kind
from mstar_core.graph.declare.nodes import STATELESS, NodeSpec
from mstar_core.graph.declare.streams import ChunkPolicy, FixedChunk, LeftContext, SlidingWindow, Stream
from mstarctl.plugins import Plugins

KINDS = ("text", "image", "audio", "video")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (FixedChunk(1, after_end="empty"), "fixed 1"),
        (LeftContext(25, 25, chunk_from="frames"), "25, left 25"),
        (SlidingWindow(28, 7, first_from="frames"), "28, stride 7"),
    ],
)
def test_a_chunk_policy_has_a_short_description(policy: ChunkPolicy, words: str) -> None:
    assert chunk_text(Stream("s", (NodeSpec(name="codec", engine=STATELESS), "x"), policy)) == words


@pytest.mark.parametrize(
    ("port", "node", "kind"),
    [
        ("tokens", "", "text"),
        ("text_tokens", "", "text"),
        ("images", "", "image"),
        ("pixel_values_videos", "", "video"),
        ("mel", "audio_encoder", "audio"),
        ("mel", "", ""),
        ("positions", "", ""),
    ],
)
def test_an_input_has_the_modality_in_its_name(port: str, node: str, kind: str) -> None:
    assert input_kind(port, node, KINDS) == kind


def test_ids_are_text_only_if_the_model_reads_text() -> None:
    assert input_kind("tokens", "", ("image",)) == ""


def test_inputs_and_outputs_of_a_real_model_have_their_modality() -> None:
    edges = graph_of(Plugins.discover().model("orpheus")).edges
    assert {edge.modality for edge in edges if not edge.source} == {"text"}
    assert {edge.modality for edge in edges if not edge.into} == {"audio"}
    assert [edge.chunk for edge in edges if edge.is_stream] == ["28, stride 7"]
