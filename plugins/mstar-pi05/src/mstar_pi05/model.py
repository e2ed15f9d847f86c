"""Nodes of Pi0.5, built from a checkpoint. Created once per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.errors import StartError
from mstar_core.layers import Checkpoint
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_pi05.checkpoint.config import fitted, read_sizes
from mstar_pi05.checkpoint.weights import CAMERAS, POLICY, load
from mstar_pi05.deployment import read_deployment, tower_dtype
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext


class Pi05:
    """Pi0.5 on one worker. Raises WeightsError if the checkpoint folder is missing or of another model."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "pi05")
        self._ctx = ctx
        self._deployment = read_deployment(ctx.model_kwargs)
        self._sizes = fitted(read_sizes(folder), self._deployment.horizon)
        self._files = Checkpoint.find(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build `LLM` in the context's dtype, or `vit_encoder` in its own, with weights, on the context's device."""
        match node.name:
            case "LLM":
                policy = self.policy()
                policy.expected_steps = self._deployment.expected_num_steps
                policy.settle(self._deployment.max_num_steps)
                return policy
            case "vit_encoder":
                return self.cameras()
            case name:
                hint = "its nodes are vit_encoder and LLM"
                raise StartError(f"pi05 has no node {name!r}", hint=hint, phase="weights")

    def vocab_size(self, node: NodeSpec) -> int:
        """Return 0: no node samples tokens."""
        return 0

    def policy(self) -> Policy:
        """Build both transformers with their weights, without the table of flow times."""
        ctx = self._ctx
        with building(ctx.device, ctx.dtype):
            module = Policy(self._sizes, self._deployment.action_dim, ctx.shard)
        load(module, self._files, POLICY, ctx.progress)
        return module.eval().requires_grad_(False)

    def cameras(self) -> Cameras:
        """Build the image tower and its projection."""
        device = self._ctx.device
        kind = tower_dtype(self._deployment.vision_dtype, is_half=self._ctx.dtype != torch.float32)
        with building(device, torch.bfloat16 if kind == "bfloat16" else torch.float32):
            module = Cameras(self._sizes, rounds=kind == "tf32")
        load(module, self._files, CAMERAS, self._ctx.progress)
        if device.type == "cuda":
            module.capture(GraphCache(device))
        return module.eval().requires_grad_(False)
