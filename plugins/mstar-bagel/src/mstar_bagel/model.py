"""Nodes of BAGEL, built from a checkpoint. Created once per worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from mstar_bagel.checkpoint.config import read_sizes
from mstar_bagel.checkpoint.weights import load
from mstar_bagel.estimate import EstimatingSteps
from mstar_bagel.nodes.autoencoder import CleanLatents, Pixels
from mstar_bagel.nodes.language import BagelLLM
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.errors import StartError
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building

if TYPE_CHECKING:
    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext


Node = TypeVar("Node", bound=nn.Module)


class Bagel:
    """BAGEL on one worker. Raises WeightsError if the checkpoint folder is missing or of another model."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "bagel")
        self._ctx = ctx
        self._folder = folder
        self._sizes = read_sizes(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build one node with its weights, on the context's device and in its dtype.

        The autoencoder's nodes take and give float32; on a GPU their convolutions are in the context's dtype.
        """
        sizes = self._sizes
        match node.name:
            case "LLM" | "LLM_cfg_text" | "LLM_cfg_img":
                return self._loaded(lambda: BagelLLM(sizes, self._ctx.shard), "LLM", self._ctx.dtype)
            case "vit_encoder":
                return self._image_encoder(node.name)
            case "vae_encoder":
                return self._autoencoder(lambda: CleanLatents(sizes), node.name)
            case "vae_decoder":
                return self._autoencoder(lambda: Pixels(sizes), node.name)
            case "combine_cfg":
                return EstimatingSteps(sizes.latent_width, self._ctx.device)
            case name:
                known = "LLM, vit_encoder, vae_encoder, vae_decoder and combine_cfg"
                raise StartError(f"bagel has no node {name!r}", hint=f"its nodes are {known}", phase="weights")

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the node's vocabulary; 0 for a node that does not sample."""
        return self._sizes.language.vocab if node.sampling is not None else 0

    def _image_encoder(self, node: str) -> ImageFeatures:
        module = self._loaded(lambda: ImageFeatures(self._sizes), node, self._ctx.dtype)
        if self._ctx.device.type == "cuda":
            module.capture(GraphCache(self._ctx.device, name=node))
        return module

    def _autoencoder(self, make: Callable[[], CleanLatents | Pixels], node: str) -> nn.Module:
        module = self._loaded(make, node, torch.float32)
        if self._ctx.device.type == "cuda" and self._ctx.dtype != torch.float32:
            module.use_half_precision(self._ctx.dtype)
        return module

    def _loaded(self, make: Callable[[], Node], node: str, dtype: torch.dtype) -> Node:
        with building(self._ctx.device, dtype, self._ctx.deferred):
            module = make()
        load(module, node, self._folder, self._ctx.progress, self._ctx.deferred)
        return module.eval().requires_grad_(False)
