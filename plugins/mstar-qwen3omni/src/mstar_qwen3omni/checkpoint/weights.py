"""Weights of each node: its tensors in the checkpoint, and the fused tensors that they fill. Used by `model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.layers.moe import expert_parts

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.plugin.model import DeferredReads, WeightProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTensors:
    """A node's tensors in the checkpoint. prefixes: checkpoint prefix -> module prefix."""

    prefixes: Mapping[str, str]


TENSORS: Final[Mapping[str, NodeTensors]] = {
    "audio_encoder": NodeTensors(prefixes={"thinker.audio_tower.": ""}),
    "vision_encoder": NodeTensors(prefixes={"thinker.visual.": ""}),
    "Thinker": NodeTensors(prefixes={"thinker.model.": "model.", "thinker.lm_head.": "lm_head."}),
    "Talker": NodeTensors(prefixes={"talker.": "", "thinker.model.embed_tokens.": "text_embedding."}),
    "Code2Wav": NodeTensors(prefixes={"code2wav.": ""}),
}
"""Tensors of each node. The talker embeds text ids itself, from the thinker's table."""


def own_tensors(files: Checkpoint, node: str) -> Checkpoint:
    """Return the part of a checkpoint that a node reads. Raises WeightsError if it has no tensors of the node."""
    prefixes = TENSORS[node].prefixes
    paths = {name: path for name, path in files.file_of.items() if name.startswith(tuple(prefixes))}
    if not paths and files.seed is None:
        raise WeightsError(
            f"{files.folder} contains no tensors of {node}",
            f"their names start with {' or '.join(prefixes)}",
            "use the folder of a Qwen3-Omni checkpoint",
            file=str(files.folder),
        )
    return Checkpoint(files.folder, paths, files.seed)


def load(
    module: nn.Module,
    tensors: Checkpoint,
    node: str,
    progress: WeightProgress | None,
    deferred: DeferredReads | None = None,
) -> None:
    """Load a node from its tensors, or leave that to `deferred`. Experts go straight into their fused tensors.

    Raises WeightsError with file and key for a missing, unknown or misshapen tensor.
    """
    names = NameMap(prefixes=TENSORS[node].prefixes)
    load_weights(module, tensors, names, progress, expert_parts(module), deferred)
