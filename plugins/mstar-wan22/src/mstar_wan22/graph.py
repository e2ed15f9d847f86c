"""Nodes and walks of Wan 2.2 for the sizes of one checkpoint. Built by `plugin.py`."""

from __future__ import annotations

from mstar_core.graph import CLIENT, STATELESS, STEP, Edge, GraphEdge, GraphNode, Loop, NodeSpec, Sequential, Walk
from mstar_core.plugin import PARTIAL_IMAGE, PROGRESS
from mstar_wan22.checkpoint.config import Sizes

SAVED_STEPS = 4
"""Steps after which latents are saved: 5 s of a video of 704 x 1280 x 121, whose values take 84 MB."""

GRID = "u8[t,h,w]"
STEPS = "f32[s,n]"
"""Table of `request.schedule.Column` of the steps of a run, or of folded steps."""


def build(sizes: Sizes) -> tuple[tuple[NodeSpec, ...], dict[str, Walk]]:
    """Return nodes and walks: text and image encoders, one or two transformers with their solver, the video decoder."""
    channels = sizes.vae.channels
    latents, frame = f"f32[{channels},t,h,w]", f"f32[{channels},1,h,w]"
    vectors = f"any[n,{sizes.text.width}]"
    text = NodeSpec(
        name="text_encoder",
        engine=STATELESS,
        weight_bytes=11_400_000_000,
        ports={"tokens": "i64[n]", "text": vectors},
        doc="ids of a prompt to one vector per id",
    )
    image = NodeSpec(
        name="vae_encoder",
        engine=STATELESS,
        weight_bytes=400_000_000,
        ports={"image": "u8[3,y,x]", "last_image": "u8[3,y,x]?", "grid": GRID, "condition": "f32[c,t,h,w]"},
        dtype="float32",
        doc="images to the latents that a video begins, or also ends, with",
    )
    experts = ("transformer", "transformer_2") if sizes.has_experts else ("transformer",)
    denoisers = [
        NodeSpec(
            name=name,
            engine=STATELESS,
            weight_bytes=10_000_000_000 if sizes.expands else 28_600_000_000,
            ports={
                "latents": latents,
                "text": vectors,
                "negative": f"{vectors}?",
                "condition": "f32[c,t,h,w]?",
                "steps": STEPS,
                "velocity": latents,
            },
            batch_key=("latents",),
            tensor_parallel=True,
            parallel_sizes=(("heads", sizes.transformer.heads),),
            doc="guided velocity of all latent frames; both branches of guidance in one pass",
        )
        for name in experts
    ]
    solver = NodeSpec(
        name="solver",
        engine=STATELESS,
        ports={
            "latents": latents,
            "history": f"f32[m,{channels},t,h,w]",
            "velocity": latents,
            "steps": STEPS,
            "grid": GRID,
            "progress": "i64[2]",
            "estimate": frame,
        },
        batch_key=("latents",),
        dtype="float32",
        doc="first noise from the seed; then one step of the flow",
    )
    decoder = NodeSpec(
        name="vae_decoder",
        engine=STATELESS,
        weight_bytes=1_110_000_000,
        ports={
            "latents": latents,
            "memory": "any[m]",
            "condition": "f32[c,t,h,w]?",
            "estimate": frame,
            "frames": "u8[f,y,x,3]",
            "image": "u8[y,x,3]",
        },
        batch_key=("latents",),
        doc="one latent frame to one frame, or to four behind the first",
    )
    chunk = GraphNode(
        decoder, ("latents", "memory", "condition", STEP), (GraphEdge("frames", CLIENT, modality="video"),)
    )
    walks: dict[str, Walk] = {
        "encode_text": GraphNode(text, ("tokens",)),
        # The loops of the denoiser start from the last values of this node.
        "first_noise": GraphNode(solver, ("grid",)),
        "decode": Loop("chunks", chunk, carry={"memory": "memory"}),
    }
    if sizes.reads_image:
        walks["encode_image"] = GraphNode(image, ("image", "last_image", "grid"))
    for name, node in zip(("denoise", "denoise_low"), denoisers, strict=False):
        walks[name] = _denoise(name, node, solver)
        # A run that ends with a preview.
        walks[f"{name}_preview"] = Sequential(
            _denoise(name, node, solver, GraphEdge("estimate", decoder)),
            GraphNode(decoder, ("estimate",), (GraphEdge("image", CLIENT, modality=PARTIAL_IMAGE),)),
        )
    encoders = (text, image) if sizes.reads_image else (text,)
    return (*encoders, *denoisers, solver, decoder), walks


def _denoise(name: str, denoiser: NodeSpec, solver: NodeSpec, *outputs: Edge) -> Loop:
    """Return the loop of the steps of one expert."""
    velocity = GraphNode(
        denoiser,
        ("latents", "text", "negative", "condition", "steps", STEP),
        (GraphEdge("velocity", solver),),
    )
    step = GraphNode(
        solver,
        ("latents", "history", "velocity", "steps", STEP),
        (GraphEdge("progress", CLIENT, modality=PROGRESS),),
    )
    carry = {"latents": "latents", "history": "history"}
    return Loop(name, Sequential(velocity, step), carry=carry, outputs=outputs, save_every=SAVED_STEPS)
