"""BAGEL's nodes and walks for the sizes of one checkpoint. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_bagel.program import CFG_IMG, CFG_TEXT
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
    Parallel,
    Sampling,
    Sequential,
    StopOn,
    Walk,
    from_param,
)

MARKERS = 2
"""Ids around the vectors of an image: start and end."""

IMAGE = Attend(mask="full", positions="shared", extra=MARKERS)
LOOK = Attend(mask="full", positions="shared", extra=MARKERS, write=False)
FLOW_TIME = (STEP, from_param("num_timesteps"), from_param("timestep_shift"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a checkpoint that the graph depends on. Defaults: ByteDance-Seed/BAGEL-7B-MoT."""

    layers: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    stop_id: int = 151645


@dataclass(frozen=True, slots=True, kw_only=True)
class BagelGraph:
    """Nodes and walks of one checkpoint."""

    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]


def build(sizes: Sizes) -> BagelGraph:
    """Build the graph: one transformer on up to three cache branches, image encoders, and the image decoder."""
    llm = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]",
            "token": "i64[1]",
            "embeds": "any[n,d]",
            "latent_embeds": "any[n,d]",
            "latents": "f32[h,w,64]",
            "velocity": "f32[h,w,64]",
            "num_timesteps": "i64",
            "timestep_shift": "f32",
        },
        kv=KVSpec(
            layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, branches=("main", CFG_TEXT, CFG_IMG)
        ),
        sampling=Sampling(port="token"),
        sequence=("tokens", "token", "embeds", "latent_embeds", "latents"),
        tensor_parallel=True,
        doc="text model and denoiser: two experts per layer, joined in attention",
    )
    cfg_text, cfg_img = llm.on_branch("LLM_cfg_text", CFG_TEXT), llm.on_branch("LLM_cfg_img", CFG_IMG)
    vit = NodeSpec(
        name="vit_encoder",
        engine=STATELESS,
        ports={"image": "f32[3,y,x]", "features": "any[n,d]"},
        batch_key=("image",),
        doc="image to vectors of understanding, connector and grid positions included",
    )
    vae_encoder = NodeSpec(
        name="vae_encoder",
        engine=STATELESS,
        ports={"image": "f32[3,y,x]", "features": "any[n,d]"},
        batch_key=("image",),
        dtype="float32",
        doc="image to clean latents at flow time 0, as vectors of the transformer",
    )
    vae_decoder = NodeSpec(
        name="vae_decoder",
        engine=STATELESS,
        ports={"latents": "f32[h,w,64]", "image": "u8[y,x,3]"},
        batch_key=("latents",),
        dtype="float32",
        doc="latents to pixels",
    )
    combine = NodeSpec(
        name="combine_cfg",
        engine=STATELESS,
        ports={
            "latents": "f32[h,w,64]",
            "v": "f32[h,w,64]",
            "v_text": "f32[h,w,64]?",
            "v_img": "f32[h,w,64]?",
            "guidance": "f32[6]",
            "num_timesteps": "i64",
            "timestep_shift": "f32",
        },
        batch_key=("latents",),
        dtype="float32",
        doc="guidance and one Euler step; without v_img main's velocity stands in, without v_text there is no guidance",
    )

    to_image = GraphEdge("latents", vae_decoder)
    passes = ((llm, "v"), (cfg_text, "v_text"), (cfg_img, "v_img"))
    velocity = Parallel(
        *(
            GraphNode(node, ("latents", *FLOW_TIME), (GraphEdge("velocity", combine, into=port),), attend=LOOK)
            for node, port in passes
        )
    )
    guided_step = GraphNode(combine, ("latents", "v", "v_text", "v_img", "guidance", *FLOW_TIME))
    walks: dict[str, Walk] = {
        # The Run names the branches that read the text. A branch node without a placement runs as part of LLM.
        "prefill_text": Parallel(
            GraphNode(llm, ("tokens",), attend=Attend(mask="causal")),
            GraphNode(cfg_img, ("tokens",), attend=Attend(mask="causal")),
        ),
        "prefill_vit": Sequential(
            GraphNode(vit, ("image",), (GraphEdge("features", llm, into="embeds"),)),
            GraphNode(llm, ("embeds",), attend=IMAGE),
        ),
        "prefill_vae": Sequential(
            GraphNode(vae_encoder, ("image",), (GraphEdge("features", llm, into="latent_embeds"),)),
            GraphNode(llm, ("latent_embeds",), attend=IMAGE),
        ),
        "decode": Loop(
            "decode_loop",
            GraphNode(llm, ("token",), (GraphEdge("token", CLIENT, modality="text"),)),
            carry={"token": "token"},
            stop=StopOn("token", (sizes.stop_id,), unless="ignore_eos"),
        ),
        "image_gen": Sequential(
            Loop(
                "denoise",
                Sequential(velocity, guided_step),
                carry={"latents": "latents"},
                outputs=(to_image,),
            ),
            GraphNode(vae_decoder, ("latents",), (GraphEdge("image", CLIENT, modality="image"),)),
        ),
    }
    return BagelGraph(nodes=(llm, cfg_text, cfg_img, vit, vae_encoder, vae_decoder, combine), walks=walks)
