"""The graph of watch frames: what its edges say of modalities and chunks."""

from __future__ import annotations

import pytest

from mstar_core.config.graph_view import chunk_text, graph_of, input_kind
from mstar_core.graph.spec.nodes import STATELESS, NodeSpec
from mstar_core.graph.spec.streams import ChunkPolicy, FixedChunk, LeftContext, SlidingWindow, Stream
from mstar_core.plugin import Plugins

KINDS = ("text", "image", "audio", "video")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (FixedChunk(1, after_end="empty"), "fixed 1"),
        (LeftContext(25, 25, chunk_from="frames"), "25, left 25"),
        (SlidingWindow(28, 7, first_from="frames"), "28, stride 7"),
    ],
)
def test_a_chunk_policy_is_a_few_short_words(policy: ChunkPolicy, words: str) -> None:
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
def test_an_input_has_the_modality_that_it_is_named_after(port: str, node: str, kind: str) -> None:
    assert input_kind(port, node, KINDS) == kind


def test_ids_are_text_only_where_a_model_reads_text() -> None:
    assert input_kind("tokens", "", ("image",)) == ""


def test_what_a_client_sends_and_gets_has_its_modality_in_a_real_model() -> None:
    edges = graph_of(Plugins.discover().model("orpheus")).edges
    assert {edge.modality for edge in edges if not edge.source} == {"text"}
    assert {edge.modality for edge in edges if not edge.into} == {"audio"}
    assert [edge.chunk for edge in edges if edge.is_stream] == ["28, stride 7"]
