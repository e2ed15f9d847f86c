"""Pi0.5's nodes and walks for one checkpoint and one deployment. Built by `plugin.py`."""

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
from mstar_pi05.checkpoint.config import ACTION_WIDTH, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGraph:
    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]


def build(sizes: Sizes, action_dim: int, vision_dtype: str | None = None) -> PolicyGraph:
    """The graph: cameras into a prefix that the action expert reads at every flow step and never adds to.

    Every port of a pass through `LLM` has one row per token of the pass, so that requests of any lengths and at any
    flow step share one: `tokens` holds IMAGE where a camera's vector stands, and `embeds` holds it.
    """
    side, plan = sizes.vision.image_size, f"f32[{sizes.horizon},{ACTION_WIDTH}]"
    vit = NodeSpec(
        name="vit_encoder",
        engine=STATELESS,
        ports={"images": f"any[c,{side},{side},3]", "tokens": "i64[n]", "features": "any[n,d]"},
        # Half precision here moves the final actions visibly: it is the deployment's choice.
        dtype="bfloat16" if vision_dtype == "bfloat16" else "float32",
        batch_key=("images",),
        doc="cameras that count to one vector per place of the prefix; masked ones are left out and take no places",
    )
    llm = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]",
            "embeds": "any[n,d]",
            "actions": plan,
            "scale": plan,
            "offset": plan,
            "robot_actions": f"f32[{sizes.horizon},{action_dim}]",
        },
        kv=KVSpec(
            layers=sizes.language.layers, kv_heads=sizes.language.kv_heads, head_dim=sizes.language.head_dim
        ),
        sequence=("tokens", "actions"),
        batch_key=("actions",),
        capture_sizes=(1, 2, 4, 5, 6, 8, 16),
        capture_tokens=prefixes(sizes),
        doc="language model for the prefix, action expert for the flow; requests of a batch may be at different steps",
    )  # fmt: skip
    cameras = GraphNode(vit, ("images", "tokens"), (GraphEdge("features", llm, into="embeds"),))
    prefix = GraphNode(llm, ("tokens", "embeds"), attend=Attend(mask="full"))
    read_only = Attend(mask="full", write=False)
    flow = GraphNode(llm, ("actions", "scale", "offset", STEP, from_param("num_steps")), attend=read_only)
    acts = GraphEdge("robot_actions", CLIENT, modality="action")
    walks: dict[str, Walk] = {
        "prefill": Sequential(cameras, prefix),
        "action_gen": Loop("flow", flow, carry={"actions": "actions"}, fused=True, outputs=(acts,)),
    }
    return PolicyGraph(nodes=(vit, llm), walks=walks)


def prefixes(sizes: Sizes) -> tuple[int, ...]:
    """Packed tokens of captured prefixes: fine steps for one request, coarser ones for up to four of three cameras."""
    step = max(1, sizes.vision.tokens // 4)
    counts = (*range(5, 17), *range(18, 33, 2), *range(36, 65, 4))
    # Below a multiple of 64, for there cuBLAS chooses better: 153 us for the gates of 828 tokens, 205 for 832 (H100).
    return tuple(count * step - min(4, step // 8) for count in counts)
