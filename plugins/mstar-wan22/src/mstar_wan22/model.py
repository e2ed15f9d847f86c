"""Nodes of Wan 2.2, built from a checkpoint. Created once per worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from mstar_core.errors import StartError
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_wan22.checkpoint.config import HIGH, LOW, read_sizes
from mstar_wan22.checkpoint.weights import load
from mstar_wan22.nodes.media import Frames, ImageLatents
from mstar_wan22.nodes.solver import Solver
from mstar_wan22.nodes.text import TextEncoder
from mstar_wan22.nodes.transformer import Denoiser, Transformer, keep_floats

if TYPE_CHECKING:
    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext

Node = TypeVar("Node", bound=nn.Module)


class Wan22:
    """Wan 2.2 on one worker. Raises WeightsError if the checkpoint folder is missing or of another model."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "wan22")
        self._ctx = ctx
        self._folder = folder
        self._sizes = read_sizes(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build one node with its weights, on the context's device and in its dtype."""
        sizes, ctx = self._sizes, self._ctx
        match node.name:
            case "text_encoder":
                return self._loaded(lambda: TextEncoder(sizes.text), node.name)
            case "transformer" | "transformer_2":
                network = self._loaded(lambda: keep_floats(Transformer(sizes.transformer, ctx.shard)), node.name)
                return Denoiser(network, expands=sizes.expands)
            case "solver":
                return Solver(sizes.transformer.outputs, ctx.device)
            case "vae_encoder":
                return self._loaded(lambda: ImageLatents(sizes), node.name)
            case "vae_decoder":
                return self._loaded(lambda: Frames(sizes.vae, expands=sizes.expands), node.name)
            case name:
                known = f"text_encoder, {HIGH}, {LOW}, solver, vae_encoder and vae_decoder"
                raise StartError(f"wan22 has no node {name!r}", hint=f"its nodes are {known}", phase="weights")

    def vocab_size(self, node: NodeSpec) -> int:
        """Return 0: no node samples tokens."""
        return 0

    def _loaded(self, make: Callable[[], Node], name: str) -> Node:
        with building(self._ctx.device, self._ctx.dtype):
            module = make()
        load(module, name, self._folder, self._ctx.progress)
        return module.eval().requires_grad_(False)
