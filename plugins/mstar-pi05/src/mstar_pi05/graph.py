"""Nodes and walks of Pi0.5 for one checkpoint and one deployment. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    Attend,
    EngineHints,
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
    """Build the graph: cameras and prompt fill a prefix cache, which the action expert reads in every flow
    step.

    Each port of a pass through `LLM` has one entry per token, so that requests of any length and at any flow step share
    a pass. `tokens` contains IMAGE at the positions of camera vectors, and `embeds` contains the vectors.
    """
    side, plan = sizes.vision.image_size, f"f32[{sizes.horizon},{ACTION_WIDTH}]"
    vit = NodeSpec(
        name="vit_encoder",
        engine=STATELESS,
        weight_bytes=1_650_000_000,  # float32
        ports={"images": f"any[c,{side},{side},3]", "tokens": "i64[n]", "features": "any[n,d]"},
        # Half precision changes the actions visibly, so it is the deployment's choice.
        dtype="bfloat16" if vision_dtype == "bfloat16" else "float32",
        batch_key=("images",),
        doc="encodes the used cameras to one vector per prefix position; masked cameras are dropped",
    )
    llm = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        weight_bytes=5_877_000_000,
        quantized_bytes=3_963_000_000,  # of the language model
        ports={
            "tokens": "i64[n]",
            "embeds": "any[n,d]",
            "actions": plan,
            "scale": plan,
            "offset": plan,
            "robot_actions": f"f32[{sizes.horizon},{action_dim}]",
        },
        kv=KVSpec(layers=sizes.language.layers, kv_heads=sizes.language.kv_heads, head_dim=sizes.language.head_dim),
        sequence=("tokens", "actions"),
        batch_key=("actions",),
        hints=EngineHints(capture_sizes=(1, 2, 4, 5, 6, 8, 16), capture_tokens=prefixes(sizes)),
        tensor_parallel=True,
        parallel_sizes=(
            ("heads", sizes.language.heads),
            ("values of an MLP", sizes.language.mlp),
            ("values of an MLP of the action expert", sizes.expert.mlp),
        ),
        doc="language model for the prefix, action expert for the flow; batched requests may be at different steps",
    )
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
    """Return the token counts of captured prefixes: small steps for one request, larger ones for up to four."""
    step = max(1, sizes.vision.tokens // 4)
    counts = (*range(5, 17), *range(18, 33, 2), *range(36, 65, 4))
    # Slightly below multiples of 64, where cuBLAS selects faster kernels: 153 us for 828 tokens, 205 for 832 (H100),
    # 147 and 169 (H200).
    return tuple(count * step - min(4, step // 8) for count in counts)
