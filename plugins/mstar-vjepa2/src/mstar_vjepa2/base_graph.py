"""Nodes and walks of V-JEPA 2. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_core.graph import CLIENT, STATELESS, GraphEdge, GraphNode, Loop, NodeSpec, Sequential, Walk, from_param
from mstar_vjepa2.program import CLIP, MASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoGraph:
    """Nodes and walks of one model of the family."""

    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]


def build_base() -> VideoGraph:
    """The graph: encoder, masked predictor, and the pooler that only classifier checkpoints fill with weights."""
    encoder = NodeSpec(
        name="video_encoder",
        engine=STATELESS,
        ports={
            CLIP: "f32[f,3,y,x]",
            "layers": "i64[l]?",
            "pooling": "i64",
            "encoder_hidden": "any[n,d]",
            "pooled": "any?",
            "layer_hidden": "any[l,n,d]?",
        },
        batch_key=(CLIP, "layers"),
        doc="a clip to one vector per patch and frame pair; with a pooling or layers, those in place of all vectors",
    )
    predictor = NodeSpec(
        name="predictor",
        engine=STATELESS,
        ports={
            "encoder_hidden": "any[n,d]",
            "context_mask": "i64[c]",
            "target_mask": "i64[t]",
            "predicted_hidden": "any[t,d]",
            "window": "any[n,d]",
        },
        batch_key=("encoder_hidden", *MASKS),
        doc="vectors at the target ids from those at the context ids; window: the input, moved on by them",
    )
    pooler = NodeSpec(
        name="pooler",
        engine=STATELESS,
        ports={"encoder_hidden": "any[n,d]", "pooled": "any[d]", "logits": "any[k]?"},
        batch_key=("encoder_hidden",),
        doc="attentive pooling, and class logits where the checkpoint has a head",
    )
    walks: dict[str, Walk] = {
        "encode": GraphNode(
            encoder,
            (CLIP, "layers", from_param("pooling")),
            (_send("encoder_hidden"), _send("pooled"), _send("layer_hidden")),
        ),
        "classify": Sequential(
            GraphNode(encoder, (CLIP,), (GraphEdge("encoder_hidden", pooler),)),
            GraphNode(pooler, ("encoder_hidden",), (_send("pooled"), _send("logits"))),
        ),
        "predict": Sequential(
            GraphNode(encoder, (CLIP,), (GraphEdge("encoder_hidden", predictor),)),
            GraphNode(predictor, ("encoder_hidden", *MASKS), (_send("predicted_hidden"),)),
        ),
        # Ids stay the same every step: the window is numbered from its own start again.
        "rollout": Sequential(
            GraphNode(encoder, (CLIP,), (GraphEdge("encoder_hidden", predictor),)),
            Loop(
                "rollout_loop",
                GraphNode(predictor, ("encoder_hidden", *MASKS), (_send("predicted_hidden"),)),
                carry={"window": "encoder_hidden"},
                fused=True,
            ),
        ),
    }
    return VideoGraph(nodes=(encoder, predictor, pooler), walks=walks)


def _send(port: str) -> GraphEdge:
    return GraphEdge(port, CLIENT, modality="tensor")
