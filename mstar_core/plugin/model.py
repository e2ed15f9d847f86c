"""Model contract: builds a worker's nodes. Imports torch for type checkers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mstar_core.errors import WeightsError
from mstar_core.graph import NodeSpec
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_core.plugin.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

WeightProgress = Callable[[int, int, str], None]
"""Called with (bytes so far, total bytes, file name) while weights are read or downloaded."""


class DeferredReads(Protocol):
    """Takes reads of weights that wait until their layer is on its device. For `building` and `load_weights`."""

    def add(
        self, module: nn.Module, targets: Mapping[str, Tensor], read: Callable[[Mapping[str, Tensor]], None]
    ) -> Mapping[str, Tensor]:
        """Note the reads of a module's tensors. Returns the targets that must be read at once, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Context in which a model builds nodes on one rank. shard: its place in the tensor-parallel group of the node.

    deferred: set for nodes that are quantized on a GPU. A model that hands it to `building` and `load_weights`, and
    changes no weights afterwards, needs no memory for the unquantized node.
    """

    spec: ModelSpec
    folder: Path | None
    device: torch.device
    dtype: torch.dtype
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    progress: WeightProgress | None = None
    shard: Shard = WHOLE
    deferred: DeferredReads | None = None

    @property
    def tp_size(self) -> int:
        """Ranks of the tensor-parallel group; 1 without one."""
        return self.shard.size


class Model(Protocol):
    """Made once per worker: `Model(ctx)`."""

    def __init__(self, ctx: ModelContext) -> None: ...

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build one node with its weights on ctx.device in ctx.dtype (or the node's own dtype)."""

    def vocab_size(self, node: NodeSpec) -> int:
        """Vocabulary of a sampling node's head; 0 for others."""


def checkpoint_folder(folder: Path | None, model: str) -> Path:
    """Return the folder of a model's checkpoint. Raises WeightsError if the deployment has none."""
    if folder is None:
        hint = f"start it with --weights DIR, or start {model}:tiny"
        raise WeightsError(f"{model} has no checkpoint folder", hint=hint)
    return folder
