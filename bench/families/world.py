"""V-JEPA 2 and 2-AC around their engines: random or checkpoint weights in any sizes, requests, and lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bench.families.engine_driver import EngineDriver
from bench.families.policy import Place, draw, prepare
from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.base import Done, Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.graph.declare.nodes import STEP, Attend
from mstar_core.layers.kv_view import KVModule, PlacedView
from mstar_core.plugin.model import ModelContext
from mstar_core.weights.building import building
from mstar_vjepa2.checkpoint.config import ActionConfig, EncoderConfig, VitConfig, read_action
from mstar_vjepa2.graph import CARRY, NORMALIZE, Sizes, build_ac
from mstar_vjepa2.model import Vjepa2Ac
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.blocks import frame_kernel
from mstar_vjepa2.nodes.encoder import FrameEncoder
from mstar_vjepa2.params import POSE
from mstar_vjepa2.plugin import mstar_models
from mstar_vjepa2.program import CLIP

Attending = Callable[[], Tensor]


def random_nodes(facts: ActionConfig, place: Place) -> dict[str, nn.Module]:
    """Build frame encoder and predictor with random weights, on the place's device in its dtype."""
    with building(place.device, place.dtype):
        made: dict[str, nn.Module] = {
            "video_encoder": FrameEncoder(facts.encoder),
            "ac_predictor": ActionPredictor(facts),
        }
    for module in made.values():
        draw(module.eval().requires_grad_(False), place.device)
    return made


def checkpoint_nodes(folder: Path, place: Place) -> tuple[ActionConfig, dict[str, nn.Module]]:
    """Build frame encoder and predictor of a checkpoint, as a worker does."""
    spec = next(spec for spec in mstar_models() if spec.name == "vjepa2_ac").bound(folder, {})
    context = ModelContext(
        spec=spec, folder=folder, device=place.device, dtype=place.dtype, model_kwargs=spec.model_kwargs
    )
    model = Vjepa2Ac(context)
    return read_action(folder), {
        name: model.get_submodule(spec.node(name)) for name in ("video_encoder", "ac_predictor")
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A request. clip: uint8 or normalised [t, 3, H, W]; states: [t, 7]; known: actions between frames [t - 1, 7];
    candidates: [K, h, 7].
    """

    clip: Tensor
    states: Tensor
    known: Tensor
    candidates: Tensor

    @property
    def frames(self) -> int:
        """Maximum cached frames of a sequence."""
        return len(self.clip) - 1 + self.candidates.shape[1]


@dataclass(slots=True)
class Rolling:
    """Both engines of one place. graphs: creates the graph cache of an engine; nothing is captured on the CPU."""

    facts: ActionConfig
    modules: dict[str, nn.Module]
    place: Place
    frames: int
    graphs: Callable[[], GraphCache] | None = None
    driver: EngineDriver = field(init=False)

    def __post_init__(self) -> None:
        """Create the engines."""
        place, facts, make = self.place, self.facts, self.graphs or partial(GraphCache, self.place.device)
        own = facts.predictor
        sizes = Sizes(
            layers=own.layers,
            heads=own.heads,
            head_dim=own.width // own.heads,
            patches=facts.encoder.frame_tokens,
            conditions=facts.conditions,
            frames=self.frames,
        )
        nodes = {node.name: node for node in build_ac(sizes).nodes}
        encoder, ahead = cast("FrameEncoder", self.modules["video_encoder"]), int(place.device.type == "cuda")
        prepare(self.modules["ac_predictor"], place)
        if place.is_captured:
            encoder.encoder.capture(make())
        self.driver = EngineDriver(
            {
                "video_encoder": StatelessEngine(
                    nodes["video_encoder"], encoder, device=place.device, dtype=place.dtype, lookahead=ahead
                ),
                "ac_predictor": KVCacheEngine(
                    nodes["ac_predictor"],
                    cast("KVModule", self.modules["ac_predictor"]),
                    KVSettings(
                        device=place.device,
                        dtype=place.dtype,
                        num_pages=place.requests * self.frames,
                        page_size=sizes.frame_tokens,
                        max_slots=nodes["ac_predictor"].kv.slots(2) if nodes["ac_predictor"].kv else 2,
                        max_seq_len=self.frames * sizes.frame_tokens,
                        vocab=0,
                        token_budget=1 << 20,
                        attention=place.attention,
                        lookahead=ahead,
                        prefix_cache=False,
                        graphs=CaptureSizes(decode=(1,)) if place.is_captured else CaptureSizes(),
                    ),
                    captures=make(),
                ),
            }
        )

    def encode(self, trial: Trial) -> tuple[Handle, Tensor]:
        """Open a request and encode its clip. Returns latents [t, S, width] on the device."""
        tokens = self.facts.encoder.frame_tokens + self.facts.conditions
        rows = len(trial.candidates)
        handle = self.driver.open(trial.frames * tokens * rows, rows)
        inputs = {CLIP: trial.clip, NORMALIZE: torch.tensor(True)}
        found: list[Done] = []
        self.driver.submit("video_encoder", handle, inputs, found.append, outputs=("encoder_hidden",))
        self.driver.run()
        return handle, found[0].outputs["encoder_hidden"]

    def context(self, handle: Handle, trial: Trial, latents: Tensor) -> None:
        """Prefill all frames except the last."""
        count = len(latents) - 1
        if not count:
            return
        tokens = self.facts.encoder.frame_tokens + self.facts.conditions
        inputs = {
            "given_frames": latents[:-1],
            "given_actions": trial.known,
            "given_states": trial.states[:-1],
            NORMALIZE: torch.tensor(True),
        }
        attend = Attend(mask="full", positions="shared", tokens=tokens)
        loop = LoopSpec(max_iters=count, fused=True)
        self.driver.submit("ac_predictor", handle, {**inputs, STEP: torch.tensor(0)}, loop=loop, attend=attend)
        self.driver.run()

    def roll(self, handle: Handle, trial: Trial, latents: Tensor) -> Tensor:
        """Roll out all candidates. Returns the last frames [K, 1, S, width], or [1, S, width] of one candidate."""
        tokens, rows = self.facts.encoder.frame_tokens + self.facts.conditions, len(trial.candidates)
        actions = trial.candidates if rows > 1 else trial.candidates[0]
        inputs = {
            "frame": latents[-1:],
            "state": trial.states[-1],
            "actions": actions,
            NORMALIZE: torch.tensor(True),
            STEP: torch.tensor(0),
        }
        loop = LoopSpec(max_iters=trial.candidates.shape[1], carry=dict(CARRY), fused=True)
        attend = Attend(mask="full", positions="shared", tokens=tokens, keep="loop")
        found: list[Done] = []
        self.driver.submit(
            "ac_predictor", handle, inputs, found.append, loop=loop, attend=attend, rows=rows, outputs=("next_frame",)
        )
        self.driver.run()
        return found[0].outputs["next_frame"]

    def whole(self, trial: Trial) -> Tensor:
        """Encode, prefill and roll out. Returns the last frames on the device."""
        with torch.inference_mode():
            handle, latents = self.encode(trial)
            self.context(handle, trial, latents)
            last = self.roll(handle, trial, latents)
        self.driver.close(handle)
        return last

    def counters(self) -> dict[str, Mapping[str, float]]:
        """Return the counters of both engines, by node."""
        runners: dict[str, Any] = dict(self.driver.runners)
        return {name: runner.counters() for name, runner in runners.items()}


def trial(facts: ActionConfig, frames: int, candidates: int, horizon: int, seed: int = 0) -> Trial:
    """Return a random request."""
    generator, side = torch.Generator().manual_seed(seed), facts.encoder.crop
    poses = torch.randn(frames, POSE, generator=generator) * 0.1
    return Trial(
        clip=torch.randint(0, 256, (frames, 3, side, side), generator=generator, dtype=torch.uint8),
        states=poses,
        known=torch.randn(frames - 1, POSE, generator=generator) * 0.05,
        candidates=torch.randn(candidates, horizon, POSE, generator=generator) * 0.05,
    )


def encode_operations(facts: EncoderConfig, clips: int, frames: int) -> float:
    """Return the operations of encoding: GEMMs of all tokens, and full attention."""
    tokens, vit = facts.tokens(frames), facts.vit
    return clips * (2.0 * tokens * block_weights(vit) * vit.layers + 4.0 * tokens**2 * vit.width * vit.layers)


def step_seconds(facts: ActionConfig, rows: int, cached: int, rates: Mapping[str, float]) -> float:
    """Return the minimum seconds of a predictor step: the larger of bytes (weights, caches) and operations."""
    own, tokens = facts.predictor, facts.encoder.frame_tokens + facts.conditions
    weights, held = block_weights(own) * own.layers, (cached + 1) * tokens
    moved = 2.0 * weights + 4.0 * rows * held * own.width * own.layers
    counted = rows * (2.0 * tokens * weights + 4.0 * tokens * held * own.width * own.layers)
    return max(moved / rates["copy_bytes_per_s"], counted / rates["product_per_s"])


def attention_seconds(facts: ActionConfig, cached: int, rates: Mapping[str, float]) -> float:
    """Return the minimum seconds of one layer's attention of a frame over itself and `cached` frames."""
    own, tokens = facts.predictor, facts.encoder.frame_tokens + facts.conditions
    held = (cached + 1) * tokens
    moved, counted = 4.0 * held * own.width, 4.0 * tokens * held * own.width
    return max(moved / rates["copy_bytes_per_s"], counted / rates["product_per_s"])


def attending(facts: ActionConfig, cached: int, device: torch.device, dtype: torch.dtype) -> dict[str, Attending]:
    """Return functions that compute one layer's attention of a frame over itself and `cached` frames, by
    name.

    splits_N: the kernels of captured passes with N KV splits per tile (0: chosen by the heuristics); pages: the torch
    reference; plain: torch over contiguous keys.
    """
    own, tokens = facts.predictor, facts.encoder.frame_tokens + facts.conditions
    heads, width, pages = own.heads, own.width // own.heads, cached + 1
    pool = torch.randn(pages + 1, 2, tokens, heads, width, device=device).to(dtype)
    shape = AttentionShape(sequences=1, tokens=tokens, pages=pages, writes=True)
    made = {"pages": AttentionBuffers(TorchAttention([pool], tokens).static(shape), device)}
    if device.type == "cuda":
        from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

        for n in (0, 1, 2, 4, 8):
            made[f"splits_{n}"] = AttentionBuffers(PagedDenseAttention([pool], tokens, shape, n or None), device)
    rows, held = np.zeros(1, dtype=np.int64), np.array([cached * tokens], dtype=np.int64)
    for each in made.values():
        tables = np.arange(pages, dtype=np.int32)[None]
        each.prepare(AttentionMetadata.of(rows, held, tables, tokens, causal=False))
    query, key, value = torch.randn(3, tokens, heads, width, device=device).to(dtype).unbind()
    found: dict[str, Attending] = {name: partial(_attended, each, query, key, value) for name, each in made.items()}
    near = torch.randn(2, 1, heads, pages * tokens, width, device=device).to(dtype)
    spread = query.transpose(0, 1)[None]
    return found | {"plain": partial(scaled_dot_product_attention, spread, near[0], near[1])}


def _attended(passes: AttentionBuffers, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    passes.reset()
    if not isinstance(passes.view, PlacedView):
        return passes.view.attend(0, query, key, value)
    from mstar_core.engine.attention.kernels.page_copies import append

    pool, places = passes.view.places(0)
    append(pool, pool.shape[2], places, key, value)
    return passes.view.attend_placed(0, query, kernel=frame_kernel(query))


def block_weights(vit: VitConfig) -> int:
    """Return the number of weights of a block."""
    return 4 * vit.width**2 + 2 * vit.width * vit.inner
