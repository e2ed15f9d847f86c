"""Nodes and walks of V-JEPA 2 and V-JEPA 2-AC. Built by `plugin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
    Sequential,
    Walk,
    from_param,
)
from mstar_vjepa2.checkpoint.config import ActionConfig
from mstar_vjepa2.params import POSE
from mstar_vjepa2.program import CLIP, EARLIER, GOALS, MASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoGraph:
    """Nodes and walks of one of the two models."""

    nodes: tuple[NodeSpec, ...]
    walks: Mapping[str, Walk]


def build_base() -> VideoGraph:
    """Build the graph of V-JEPA 2: encoder, masked predictor and pooler. Only classifier checkpoints have pooler
    weights.
    """
    encoder = NodeSpec(
        name="video_encoder",
        engine=STATELESS,
        ports={
            CLIP: "any[f,3,y,x]",  # uint8 pixels as cropped (a quarter of the bytes), or normalised floats
            "layers": "i64[l]?",
            "pooling": "i64",
            "encoder_hidden": "any[n,d]?",
            "pooled": "f32?",
            "layer_hidden": "f32[l,n,d]?",
        },
        batch_key=(CLIP, "layers"),
        doc="encodes a clip to one vector per patch and frame pair, or to pooled vectors or chosen layers",
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
        doc="predicts vectors at the target ids from those at the context ids; window: the input shifted by them",
    )
    pooler = NodeSpec(
        name="pooler",
        engine=STATELESS,
        ports={"encoder_hidden": "any[n,d]", "pooled": "f32[d]", "logits": "f32[k]?"},
        batch_key=("encoder_hidden",),
        doc="attentive pooling, and class logits if the checkpoint has a head",
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
    # Clients of an earlier system receive latents as modality `video`.
    for suffix, modality in (("", "tensor"), ("_video", EARLIER)):
        edges = (_send("predicted_hidden", modality),)
        encoded = GraphNode(encoder, (CLIP,), (GraphEdge("encoder_hidden", predictor),))
        step = GraphNode(predictor, ("encoder_hidden", *MASKS), edges)
        walks[f"predict{suffix}"] = Sequential(encoded, step)
        # Token ids stay the same in every step: they are relative to the start of the window.
        loop = Loop("rollout_loop", step, carry={"window": "encoder_hidden"}, fused=True)
        walks[f"rollout{suffix}"] = Sequential(encoded, loop)
    return VideoGraph(nodes=(encoder, predictor, pooler), walks=walks)


def _send(port: str, modality: str = "tensor") -> GraphEdge:
    return GraphEdge(port, CLIENT, modality=modality)


NORMALIZE = from_param("normalize_reps")
FREE_AXES = 4
"""Planned values per action: x, y, z, gripper."""

CEM = tuple(
    from_param(name)
    for name in ("topk", "momentum_mean", "momentum_std", "momentum_mean_gripper", "momentum_std_gripper")
)
ROLLOUT_FRAMES = 16
"""Frames that a usual rollout caches."""

MOST_SCORED = 512
"""Maximum number of candidates of a scored rollout. All of them keep their caches until the last step is scored."""

_OF_ROWS = (
    "frame",
    "state",
    "actions",
    "states",
    "extrinsics",
    "given_frames",
    "given_actions",
    "given_states",
    "given_extrinsics",
)
"""Ports of the predictor that hold one value per candidate."""

_OF_STEPS = tuple(name for name in _OF_ROWS if name not in ("frame", "state"))
"""Ports that hold one entry per step. Lengths may differ between candidates; a pass reads the entry of its step."""

Emits = Literal["steps", "last", "nothing", "video"]
"""Latents that leave a rollout. `video`: those of each step, as modality `video` and without states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that the graph depends on. Defaults: vjepa2-ac-vitg.

    conditions: tokens per frame in addition to its patches. frames: latent frames of one rollout, context included.
    """

    layers: int = 24
    heads: int = 16
    head_dim: int = 64
    patches: int = 256
    conditions: int = 2
    frames: int = 32

    @classmethod
    def of(cls, config: ActionConfig) -> Sizes:
        """Return the sizes of a checkpoint."""
        predictor = config.predictor
        return cls(
            layers=predictor.layers,
            heads=predictor.heads,
            head_dim=predictor.width // predictor.heads,
            patches=config.encoder.frame_tokens,
            conditions=config.conditions,
            frames=config.most_frames,
        )

    @property
    def frame_tokens(self) -> int:
        """Tokens of one frame. The page size equals it, so that no page is partly filled."""
        return self.patches + self.conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    encoder: NodeSpec
    predictor: NodeSpec
    scorer: NodeSpec
    sampler: NodeSpec
    update: NodeSpec


def build_ac(sizes: Sizes) -> VideoGraph:
    """Build the graph of V-JEPA 2-AC: a per-frame encoder, a frame-causal predictor, a scorer and a planner."""
    nodes = _nodes(sizes)
    # All tokens of a frame share one time step and attend to each other and to every earlier frame.
    read = Attend(mask="full", positions="shared", tokens=sizes.frame_tokens)
    # Candidates and planning steps all start from the context: the loop discards what a rollout appends.
    trial = Attend(mask="full", positions="shared", tokens=sizes.frame_tokens, keep="loop")
    walks: dict[str, Walk] = {
        "encode": GraphNode(nodes.encoder, (CLIP, NORMALIZE), (_send("encoder_hidden"),)),
        "predict": _teacher(nodes, "teacher_loop", trial, (_send("next_frame"), _send("next_state"))),
        "prefill_context": _teacher(nodes, "context_loop", read, ()),
        "encode_video": GraphNode(nodes.encoder, (CLIP, NORMALIZE), (_send("encoder_hidden", EARLIER),)),
        "predict_video": _teacher(nodes, "teacher_loop", trial, (_send("next_frame", EARLIER),)),
        "rollout": _rollout(nodes, trial, "steps", is_scored=False),
        "rollout_final": _rollout(nodes, trial, "last", is_scored=False),
        "rollout_scored": _rollout(nodes, trial, "steps", is_scored=True),
        "rollout_scored_final": _rollout(nodes, trial, "last", is_scored=True),
        "rollout_energies": _rollout(nodes, trial, "nothing", is_scored=True),
        "rollout_video": _rollout(nodes, trial, "video", is_scored=False),
        "rollout_scored_video": _rollout(nodes, trial, "video", is_scored=True),
        "plan": _plan(nodes, trial, streams_steps=False),
        "plan_told": _plan(nodes, trial, streams_steps=True),
    }
    return VideoGraph(nodes=(nodes.encoder, nodes.predictor, nodes.scorer, nodes.sampler, nodes.update), walks=walks)


def _nodes(sizes: Sizes) -> _Nodes:
    # Latents stay float32 between steps in any compute dtype: energies of similar candidates differ little.
    frames, frame, poses = f"f32[t,{sizes.patches},d]", f"f32[1,{sizes.patches},d]", f"f32[h,{POSE}]"
    encoder = NodeSpec(
        name="video_encoder",
        engine=STATELESS,
        weight_bytes=2_024_000_000,
        ports={
            CLIP: "f32[t,3,y,x]",
            "goal_frame": "f32[1,3,y,x]?",
            "goal_latents": "f32[s,d]?",
            "normalize_reps": "b8",
            "encoder_hidden": frames,
            "goal": "f32[s,d]?",
        },
        batch_key=(CLIP, "goal_frame"),
        per="request",
        doc="encodes each frame alone to normalised latents; a goal image joins the batch, goal latents pass through",
    )
    predictor = NodeSpec(
        name="ac_predictor",
        engine=KV_CACHE,
        weight_bytes=610_000_000,
        ports={
            "frame": frame,
            "state": f"f32[{POSE}]",
            "actions": poses,
            "states": f"f32[h,{POSE}]?",
            "extrinsics": "f32[h,6]?",
            "given_frames": frames,
            "given_actions": poses,
            "given_states": poses,
            "given_extrinsics": "f32[h,6]?",
            "normalize_reps": "b8",
            "next_frame": frame,
            "next_state": f"f32[{POSE}]",
        },
        kv=KVSpec(
            layers=sizes.layers,
            kv_heads=sizes.heads,
            head_dim=sizes.head_dim,
            page=sizes.frame_tokens,
            rows=MOST_SCORED,
            request_tokens=ROLLOUT_FRAMES * sizes.frame_tokens,
        ),
        row_ports=(*_OF_ROWS, "next_frame", "next_state"),
        step_ports=_OF_STEPS,
        batch_key=("frame",),
        hints=EngineHints(capture_sizes=(1, 2, 4, 8, 16, 32, 64, 128)),
        doc="predicts the next frame from this one, its action and state, and all cached earlier frames",
    )
    scorer = NodeSpec(
        name="mpc_scorer",
        engine=STATELESS,
        ports={"final": frame, "goal": "f32[s,d]", "cost": "i64", "energies": "f32[1]", "best_index": "i64[1]"},
        per="request",
        dtype="float32",
        doc="distance of each candidate's frame to the goal, and the nearest candidate",
    )
    sampler = NodeSpec(
        name="cem_sampler",
        engine=STATELESS,
        ports={
            "mean": f"f32[h,{FREE_AXES}]",
            "std": f"f32[h,{FREE_AXES}]",
            "noise": f"f32[c,h,k,{FREE_AXES}]",
            "fixed_axes": f"f32[{FREE_AXES}]",
            "close_from": "i64[1]",
            "maxnorm": "f32",
            "candidates": poses,
        },
        per="request",
        dtype="float32",
        doc="draws the candidates of a planning step from its noise; free axes are NaN in fixed_axes",
    )
    update = NodeSpec(
        name="cem_update",
        engine=STATELESS,
        ports={
            "mean": f"f32[h,{FREE_AXES}]",
            "std": f"f32[h,{FREE_AXES}]",
            "candidates": poses,
            "energies": "f32[1]",
            "topk": "i64",
            "momentum_mean": "f32",
            "momentum_std": "f32",
            "momentum_mean_gripper": "f32",
            "momentum_std_gripper": "f32",
            "actions": poses,
            "best_energy": "f32[1]",
        },
        per="request",
        dtype="float32",
        doc="moves mean and spread toward the best candidates; actions: the current plan",
    )
    return _Nodes(encoder=encoder, predictor=predictor, scorer=scorer, sampler=sampler, update=update)


def _teacher(nodes: _Nodes, name: str, attend: Attend, out: tuple[Edge, ...]) -> Walk:
    """Run the predictor over known frames with known actions and states, one frame per step."""
    taken = ("given_frames", "given_actions", "given_states", "given_extrinsics", STEP, NORMALIZE)
    return Sequential(
        GraphNode(
            nodes.encoder, (CLIP, NORMALIZE), (GraphEdge("encoder_hidden", nodes.predictor, into="given_frames"),)
        ),
        Loop(name, GraphNode(nodes.predictor, taken, out, attend=attend), fused=True),
    )


def _encode(nodes: _Nodes, *, with_goal: bool) -> GraphNode:
    start = GraphEdge("encoder_hidden", nodes.predictor, into="frame")
    if not with_goal:
        return GraphNode(nodes.encoder, (CLIP, NORMALIZE), (start,))
    return GraphNode(nodes.encoder, (CLIP, *GOALS, NORMALIZE), (start, GraphEdge("goal", nodes.scorer)))


def _step(nodes: _Nodes, attend: Attend, out: tuple[Edge, ...]) -> GraphNode:
    taken = ("frame", "state", "actions", "states", "extrinsics", STEP, NORMALIZE)
    return GraphNode(nodes.predictor, taken, out, attend=attend)


CARRY = {"next_frame": "frame", "next_state": "state"}


def _rollout(nodes: _Nodes, attend: Attend, emits: Emits, *, is_scored: bool) -> Walk:
    """Roll out all candidates together. The requested outputs and the energies of a step leave when the step ends."""
    latents = (_send("next_frame"),)
    edges: tuple[Edge, ...] = (_send("next_state"), *(latents if emits == "steps" else ()))
    if emits == "video":
        edges = (_send("next_frame", EARLIER),)
    last: tuple[Edge, ...] = latents if emits == "last" else ()
    body: Walk = _step(nodes, attend, edges)
    if is_scored:
        scored = (*edges, GraphEdge("next_frame", nodes.scorer, into="final"))
        score = GraphNode(nodes.scorer, ("final", "goal", from_param("cost")), (_send("energies"),))
        body = Sequential(_step(nodes, attend, scored), score)
        last = (*last, GraphEdge("best_index", CLIENT, modality="scalar"))
    return Sequential(
        _encode(nodes, with_goal=is_scored), Loop("rollout_loop", body, carry=CARRY, fused=not is_scored, outputs=last)
    )


def _plan(nodes: _Nodes, attend: Attend, *, streams_steps: bool) -> Walk:
    """Search for a plan: sample candidates, roll them out, score them against the goal, update mean and spread, repeat.

    streams_steps: candidates, energies, mean and spread of each planning step leave when it ends.
    """

    def streamed(*ports: str) -> tuple[GraphEdge, ...]:
        return tuple(_send(port) for port in ports if streams_steps)

    draw = GraphNode(
        nodes.sampler,
        ("mean", "std", "noise", "fixed_axes", "close_from", from_param("maxnorm"), STEP),
        (
            GraphEdge("candidates", nodes.predictor, into="actions"),
            GraphEdge("candidates", nodes.update),
            *streamed("candidates"),
        ),
    )
    roll = Loop(
        "rollout_loop",
        _step(nodes, attend, ()),
        carry=CARRY,
        fused=True,
        outputs=(GraphEdge("next_frame", nodes.scorer, into="final"),),
    )
    score = GraphNode(
        nodes.scorer,
        ("final", "goal", from_param("cost")),
        (GraphEdge("energies", nodes.update), *streamed("energies")),
    )
    learn = GraphNode(
        nodes.update, ("mean", "std", "candidates", "energies", *CEM), streamed("mean", "std", "best_energy")
    )
    ends = ("actions",) if streams_steps else ("actions", "mean", "std", "best_energy")
    result = tuple(_send(port) for port in ends)
    search = Loop(
        "cem_loop",
        Sequential(draw, roll, score, learn),
        carry={"mean": "mean", "std": "std"},
        outputs=result,
    )
    return Sequential(_encode(nodes, with_goal=True), search)
