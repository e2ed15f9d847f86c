"""Pi0.5's nodes and walks for one checkpoint and one horizon. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    Attend,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Sequential,
    Walk,
    from_param,
)
from mstar_pi05.params import ACTION_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the graph needs of checkpoint and deployment. Defaults: lerobot/pi05_base."""

    layers: int = 18
    kv_heads: int = 1
    head_dim: int = 256
    image_side: int = 224
    horizon: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGraph:
    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]


def build(sizes: Sizes) -> PolicyGraph:
    """The graph: cameras into a prefix that the action expert reads at every flow step and never adds to."""
    side, plan = sizes.image_side, f"f32[{sizes.horizon},{ACTION_WIDTH}]"
    vit = NodeSpec(
        name="vit_encoder",
        engine=STATELESS,
        ports={"images": f"f32[c,3,{side},{side}]", "features": "any[m,d]"},
        dtype="float32",  # half precision here moves the final actions visibly
        batch_key=("images",),
        doc="cameras that count, in order, to vectors; masked ones are left out and take no positions",
    )
    llm = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        ports={"embeds": "any[m,d]", "tokens": "i64[n]", "actions": plan, "num_steps": "i64"},
        kv=KVSpec(layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim),
        sequence=("embeds", "tokens", "actions"),
        batch_key=("actions",),
        doc="language model for the prefix, action expert for the flow; requests of a batch may be at different steps",
    )
    prefix = GraphNode(llm, ("embeds", "tokens"), attend=Attend(mask="full"))
    flow = GraphNode(llm, ("actions", STEP, from_param("num_steps")), attend=Attend(mask="full", write=False))
    acts = GraphEdge("actions", CLIENT, modality="action")
    walks: dict[str, Walk] = {
        "prefill": Sequential(GraphNode(vit, ("images",), (GraphEdge("features", llm, into="embeds"),)), prefix),
        "action_gen": Loop("flow", flow, carry={"actions": "actions"}, fused=True, outputs=(acts,)),
    }
    return PolicyGraph(nodes=(vit, llm), walks=walks)
