"""Nodes of both models, built from a checkpoint. Created once per worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from torch import nn

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.errors import StartError, WeightsError
from mstar_core.weights.building import building
from mstar_vjepa2.checkpoint import names
from mstar_vjepa2.checkpoint.config import read_action, read_base
from mstar_vjepa2.checkpoint.files import has_pooler
from mstar_vjepa2.checkpoint.loading import Source, fill
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import ClipEncoder, FrameEncoder
from mstar_vjepa2.nodes.planning import Sampler, Scorer, Update
from mstar_vjepa2.nodes.pooler import NoPooler, Pooler
from mstar_vjepa2.nodes.predictor import MaskedPredictor

if TYPE_CHECKING:
    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext

BASE_RULES: Final = (names.ENCODER, names.PREDICTOR, names.POOLER)
AC_RULES: Final = (names.ENCODER, names.ACTION)
M = TypeVar("M", bound=nn.Module)
E = TypeVar("E", ClipEncoder, FrameEncoder)


class Vjepa2:
    """V-JEPA 2 on one worker. Raises WeightsError if the checkpoint folder is missing or incomplete."""

    def __init__(self, ctx: ModelContext) -> None:
        self._ctx = ctx
        self._folder = _folder(ctx)
        self._config = read_base(self._folder)
        self._source = Source.find(self._folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build `video_encoder`, `predictor` or `pooler` with the context's dtype and device."""
        _refuse_splits(self._ctx)
        match node.name:
            case "video_encoder":
                encoder = _built(self._ctx, lambda: ClipEncoder(self._config.encoder))
                fill(encoder.encoder, self._source, names.ENCODER, BASE_RULES, self._ctx.progress)
                return _captured(encoder, self._ctx)
            case "predictor":
                count = self._config.mask_tokens
                predictor = _built(self._ctx, lambda: MaskedPredictor(self._config))
                fill(predictor, self._source, names.PREDICTOR, BASE_RULES, self._ctx.progress, mask_tokens=count)
                return predictor
            case "pooler":
                return self._pooler()
            case name:
                raise _no_node("vjepa2", name, "video_encoder, predictor and pooler")

    def vocab_size(self, node: NodeSpec) -> int:
        """Return 0: no node samples tokens."""
        return 0

    def _pooler(self) -> nn.Module:
        if not has_pooler(self._folder):
            return NoPooler()
        config, vit = self._config, self._config.encoder.vit
        heads = self._ctx.model_kwargs.get("pooler_heads") or vit.heads
        if vit.width % heads:
            raise WeightsError(f"pooler_heads {heads} does not divide the width {vit.width}", hint="use 16, or omit it")
        labels = config.labels if "classifier.weight" in self._source.stored else 0
        pooler = _built(self._ctx, lambda: Pooler(vit.width, heads, config.pooler_layers, labels, vit.eps))
        fill(pooler, self._source, names.POOLER, BASE_RULES, self._ctx.progress)
        return pooler


class Vjepa2Ac:
    """V-JEPA 2-AC on one worker. Raises WeightsError if the checkpoint folder is missing or incomplete."""

    def __init__(self, ctx: ModelContext) -> None:
        self._ctx = ctx
        folder = _folder(ctx)
        self._config = read_action(folder)
        self._source = Source.find(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build a node. Encoder and predictor have the context's dtype; scorer and planner nodes are float32."""
        _refuse_splits(self._ctx)
        match node.name:
            case "video_encoder":
                encoder = _built(self._ctx, lambda: FrameEncoder(self._config.encoder))
                fill(encoder.encoder, self._source, names.ENCODER, AC_RULES, self._ctx.progress)
                return _captured(encoder, self._ctx)
            case "ac_predictor":
                predictor = _built(self._ctx, lambda: ActionPredictor(self._config))
                fill(predictor, self._source, names.ACTION, AC_RULES, self._ctx.progress)
                return predictor
            case "mpc_scorer":
                return Scorer()
            case "cem_sampler":
                return Sampler()
            case "cem_update":
                return Update()
            case name:
                known = "video_encoder, ac_predictor, mpc_scorer, cem_sampler and cem_update"
                raise _no_node("vjepa2_ac", name, known)

    def vocab_size(self, node: NodeSpec) -> int:
        """Return 0: no node samples tokens."""
        return 0


def _folder(ctx: ModelContext) -> Path:
    if ctx.folder is None:
        name = ctx.spec.name
        raise WeightsError(
            f"{name} has no checkpoint folder", hint=f"start it with --weights DIR, or start {name}:tiny"
        )
    return ctx.folder


def _refuse_splits(ctx: ModelContext) -> None:
    if ctx.tp_size > 1:
        raise StartError(
            f"{ctx.spec.name} cannot split its nodes over {ctx.tp_size} ranks",
            "each rank holds whole layers",
            "set tp_size: 1; more ranks than tp_size make replicas",
            phase="weights",
        )


def _captured(encoder: E, ctx: ModelContext) -> E:
    """Capture the encoder's CUDA graphs on a GPU. Returns the encoder."""
    if ctx.device.type == "cuda":
        encoder.encoder.capture(GraphCache(ctx.device))
    return encoder


def _no_node(model: str, name: str, known: str) -> StartError:
    return StartError(f"{model} has no node {name!r}", hint=f"its nodes are {known}", phase="weights")


def _built(ctx: ModelContext, make: Callable[[], M]) -> M:
    """Build an uninitialised module on the context's device in its dtype. float32 buffers keep their dtype."""
    with building(ctx.device, ctx.dtype):
        module = make()
    return module.eval().requires_grad_(False)
