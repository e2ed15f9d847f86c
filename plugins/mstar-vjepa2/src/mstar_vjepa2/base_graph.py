"""Nodes and walks of V-JEPA 2. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_core.graph import CLIENT, STATELESS, GraphEdge, GraphNode, Loop, NodeSpec, Sequential, Walk, from_param
from mstar_vjepa2.program import CLIP, EARLIER, MASKS


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
            CLIP: "any[f,3,y,x]",  # uint8 as cropped, a quarter of the bytes; floats are normalised already
            "layers": "i64[l]?",
            "pooling": "i64",
            "encoder_hidden": "any[n,d]",
            "pooled": "f32?",
            "layer_hidden": "f32[l,n,d]?",
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
            "predicted_hidden": "f32[t,d]",
            "window": "any[n,d]",
        },
        batch_key=("encoder_hidden", *MASKS),
        doc="vectors at the target ids from those at the context ids; window: the input, moved on by them",
    )
    pooler = NodeSpec(
        name="pooler",
        engine=STATELESS,
        ports={"encoder_hidden": "any[n,d]", "pooled": "f32[d]", "logits": "f32[k]?"},
        batch_key=("encoder_hidden",),
        doc="attentive pooling, and class logits where the checkpoint has a head",
    )
    walks: dict[str, Walk] = {
        "encode": GraphNode(
            encoder,
            (CLIP, "layers", from_param("pooling")),
            (_send("encoder_hidden"), _send("pooled"), _send("layer_hidden")),
        ),
        "encode_video": GraphNode(encoder, (CLIP, from_param("pooling")), (_send("encoder_hidden", EARLIER),)),
        "classify": Sequential(
            GraphNode(encoder, (CLIP,), (GraphEdge("encoder_hidden", pooler),)),
            GraphNode(pooler, ("encoder_hidden",), (_send("pooled"), _send("logits"))),
        ),
    }
    # An earlier system sent latents under the name of video.
    for suffix, modality in (("", "tensor"), ("_video", EARLIER)):
        made = (_send("predicted_hidden", modality),)
        encoded = GraphNode(encoder, (CLIP,), (GraphEdge("encoder_hidden", predictor),))
        step = GraphNode(predictor, ("encoder_hidden", *MASKS), made)
        walks[f"predict{suffix}"] = Sequential(encoded, step)
        # Ids stay the same every step: the window is numbered from its own start again.
        loop = Loop("rollout_loop", step, carry={"window": "encoder_hidden"}, fused=True)
        walks[f"rollout{suffix}"] = Sequential(encoded, loop)
    return VideoGraph(nodes=(encoder, predictor, pooler), walks=walks)


def _send(port: str, modality: str = "tensor") -> GraphEdge:
    return GraphEdge(port, CLIENT, modality=modality)
