"""Weights of each node: its tensors in the checkpoint, and the fused tensors that they fill. Used by `model`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.layers.moe import expert_parts

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.plugin.model import WeightProgress


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
    own = {name: path for name, path in files.file_of.items() if name.startswith(tuple(prefixes))}
    if not own and files.seed is None:
        raise WeightsError(
            f"{files.folder} contains no tensors of {node}", f"their names start with {' or '.join(prefixes)}",
            "use the folder of a Qwen3-Omni checkpoint", file=str(files.folder),
        )  # fmt: skip
    return Checkpoint(files.folder, own, files.seed)


def load(module: nn.Module, own: Checkpoint, node: str, progress: WeightProgress | None) -> None:
    """Load a node from its tensors. Experts go straight into their fused tensors.

    Raises WeightsError with file and key for a missing, unknown or misshapen tensor.
    """
    load_weights(module, own, NameMap(prefixes=TENSORS[node].prefixes), progress, expert_parts(module))


@contextlib.contextmanager
def building(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Create parameters on `device`, in `dtype` by default, without initializing them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, _SkipInit():
            yield
    finally:
        torch.set_default_dtype(before)


class _SkipInit(TorchFunctionMode):
    """Skips the random initialization of parameters, because all of them are loaded afterwards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))
