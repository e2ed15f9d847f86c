"""BAGEL's nodes and walks for the sizes of one checkpoint. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_bagel.checkpoint.config import Sizes
from mstar_bagel.program import CFG_IMG, CFG_TEXT
from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    Attend,
    Edge,
    EngineHints,
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
)
from mstar_core.plugin import PARTIAL_IMAGE, PROGRESS

MARKERS = 2
"""Ids around the vectors of an image: start and end."""

IMAGE = Attend(mask="full", positions="shared", extra=MARKERS)
LOOK = Attend(mask="full", positions="shared", extra=MARKERS, write=False)
PAGE = 64
"""Tokens of a cache page: a block of keys of the attention kernel of image steps."""

PASS_TOKENS = 3 * (64 * 64 + MARKERS)
"""All branches of the largest image share a forward pass: it reads the weights once, and large products are faster."""

EDIT_TOKENS = 9216
"""Tokens that an edit of a 1024 x 1024 image caches: 4,096 of its latents, 4,900 of its patches, markers and text."""

IMAGE_BUCKETS = (320, 640, 1024, 1408, 2048, 2816)
"""Tokens of captured passes over images of a prompt: one image of 512 x 512 has 1,371, and the last takes two."""

SAVED_STEPS = 4
"""Steps after which latents are saved: 0.8 s of a guided image of 1024 x 1024, whose latents take 1 MiB."""

TIMES = "f32[s,4]"
"""Flow time, length, number and slope length of each step of a run, see `request.schedule.steps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BagelGraph:
    """Nodes and walks of one checkpoint."""

    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """All nodes. The branch nodes share the weights of `llm`."""

    llm: NodeSpec
    cfg_text: NodeSpec
    cfg_img: NodeSpec
    vit: NodeSpec
    vae_encoder: NodeSpec
    vae_decoder: NodeSpec
    combine: NodeSpec


def build(sizes: Sizes, *, captures_images: bool = False) -> BagelGraph:
    """Build the graph: one transformer on up to three cache branches, image encoders, and the image decoder.

    captures_images: capture passes over images that begin a prompt.
    """
    nodes = _nodes(sizes, IMAGE_BUCKETS if captures_images else ())
    every = (nodes.llm, nodes.cfg_text, nodes.cfg_img, nodes.vit, nodes.vae_encoder, nodes.vae_decoder, nodes.combine)
    return BagelGraph(nodes=every, walks=_walks(nodes, sizes.ids.end))


def _nodes(sizes: Sizes, image_buckets: tuple[int, ...]) -> _Nodes:
    latents = f"f32[h,w,{sizes.latent_width}]"
    language = sizes.language
    llm = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]",
            "token": "i64[1]",
            "embeds": "any[n,d]",
            "latent_embeds": "any[n,d]",
            "latents": latents,
            "velocity": latents,
            "times": TIMES,
        },
        kv=KVSpec(
            layers=language.layers,
            kv_heads=language.kv_heads,
            head_dim=language.head_dim,
            branches=("main", CFG_TEXT, CFG_IMG),
            page=PAGE,
            request_tokens=EDIT_TOKENS,
        ),
        sampling=Sampling(port="token", vocab=language.vocab, is_text=True),
        sequence=("tokens", "token", "embeds", "latent_embeds", "latents"),
        # Images of any size share a forward pass.
        row_ports=("embeds", "latent_embeds", "latents", "velocity", "times"),
        step_ports=("times",),
        hints=EngineHints(pass_tokens=PASS_TOKENS, capture_sizes=(1, 2, 3, 4), capture_tokens=image_buckets),
        batch_key=("times",),
        tensor_parallel=True,
        parallel_sizes=(("heads", language.heads), ("values of an MLP", language.mlp)),
        weight_bytes=28_340_000_000,
        quantized_bytes=26_101_000_000,
        doc="text model and denoiser: two experts per layer, joined in attention",
    )
    return _Nodes(
        llm=llm,
        cfg_text=llm.on_branch("LLM_cfg_text", CFG_TEXT),
        cfg_img=llm.on_branch("LLM_cfg_img", CFG_IMG),
        vit=NodeSpec(
            name="vit_encoder",
            engine=STATELESS,
            weight_bytes=874_000_000,
            ports={"image": "u8[y,x,c]", "features": "any[n,d]"},  # as decoded, or resized: [c, y, x]
            ragged=("image",),
            doc="image to vectors of understanding, resizing, connector and grid positions included",
        ),
        vae_encoder=NodeSpec(
            name="vae_encoder",
            engine=STATELESS,
            weight_bytes=252_000_000,
            ports={"image": "u8[3,y,x]", "features": "any[n,d]"},
            ragged=("image",),
            dtype="float32",
            doc="image to clean latents at flow time 0, as vectors of the transformer",
        ),
        vae_decoder=NodeSpec(
            name="vae_decoder",
            engine=STATELESS,
            weight_bytes=198_000_000,
            ports={"latents": latents, "image": "u8[y,x,3]"},
            ragged=("latents",),
            dtype="float32",
            doc="latents to pixels",
        ),
        combine=NodeSpec(
            name="combine_cfg",
            engine=STATELESS,
            ports={
                "latents": latents,
                "history": latents,
                "v": latents,
                "v_text": f"{latents}?",
                "v_img": f"{latents}?",
                "guidance": "f32[5]",
                "times": TIMES,
                "grid": "u8[h,w]",
                "progress": "i64[2]",
                "estimate": f"{latents}?",
            },
            ragged=("latents", "history", "v", "v_text", "v_img", "times", "grid"),
            dtype="float32",
            doc="first noise from the seed; then guidance and an Euler step: without v_text nothing is guided, "
            "without v_img the velocity of main takes its place",
        ),
    )


def _walks(nodes: _Nodes, stop_id: int) -> dict[str, Walk]:
    llm, cfg_img = nodes.llm, nodes.cfg_img
    answer = GraphEdge("token", CLIENT, modality="text")
    return {
        # The Run names the branches that read the text. A branch node without a placement runs as part of LLM.
        "prefill_text": Parallel(
            GraphNode(llm, ("tokens",), attend=Attend(mask="causal")),
            GraphNode(cfg_img, ("tokens",), attend=Attend(mask="causal")),
        ),
        # The end of a prompt, with the id from which the answer is decoded: it draws the first id.
        "prefill_last": GraphNode(llm, ("tokens",), (answer,), attend=Attend(mask="causal")),
        "prefill_vit": Sequential(
            GraphNode(nodes.vit, ("image",), (GraphEdge("features", llm, into="embeds"),)),
            GraphNode(llm, ("embeds",), attend=IMAGE),
        ),
        "prefill_vae": Sequential(
            GraphNode(nodes.vae_encoder, ("image",), (GraphEdge("features", llm, into="latent_embeds"),)),
            GraphNode(llm, ("latent_embeds",), attend=IMAGE),
        ),
        "decode": Loop(
            "decode_loop",
            GraphNode(llm, ("token",), (answer,)),
            carry={"token": "token"},
            stop=StopOn("token", (stop_id,), unless="ignore_eos"),
        ),
        # The loops below start from the last latents of this node.
        "first_noise": GraphNode(nodes.combine, ("grid",)),
        # Runs of this loop follow each other where guidance begins or ends.
        "denoise": _denoise(nodes),
        # A run that ends with an estimate of the image.
        "partial_image": Sequential(
            _denoise(nodes, GraphEdge("estimate", nodes.vae_decoder, into="latents")),
            GraphNode(nodes.vae_decoder, ("latents",), (GraphEdge("image", CLIENT, modality=PARTIAL_IMAGE),)),
        ),
        "image_gen": Sequential(
            _denoise(nodes, GraphEdge("latents", nodes.vae_decoder)),
            GraphNode(nodes.vae_decoder, ("latents",), (GraphEdge("image", CLIENT, modality="image"),)),
        ),
    }


def _denoise(nodes: _Nodes, *outputs: Edge) -> Loop:
    """Return the loop of Euler steps. Its branches and its number of steps are those of the Run."""
    passes = ((nodes.llm, "v"), (nodes.cfg_text, "v_text"), (nodes.cfg_img, "v_img"))
    velocity = Parallel(
        *(
            GraphNode(node, ("latents", "times", STEP), (GraphEdge("velocity", nodes.combine, into=port),), attend=LOOK)
            for node, port in passes
        )
    )
    told = GraphEdge("progress", CLIENT, modality=PROGRESS)
    step = GraphNode(nodes.combine, ("latents", "history", "v", "v_text", "v_img", "guidance", "times", STEP), (told,))
    carry = {"latents": "latents", "history": "history"}
    return Loop("denoise", Sequential(velocity, step), carry=carry, outputs=outputs, save_every=SAVED_STEPS)
