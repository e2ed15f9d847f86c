"""Tensors of a node by what a sleep does with them. Made from a module by its runner, read by the sleepers."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor, nn


class MemoryContent(enum.Enum):
    """Content of a storage. A sleep of level 1 keeps weights and kept values on the host, one of level 2 kept values.

    WEIGHTS: can be read from the files again. KEPT: cannot, such as LoRA adapters. SCRATCH: zero after a wake.
    """

    WEIGHTS = "weights"
    KEPT = "kept"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Memory of a node on one device. module: its weights. kept: tensors outside it whose values must stay.

    scratch: tensors whose values a sleep may lose, such as the pools of a cache. They are zero after a wake.
    """

    module: nn.Module | None = None
    kept: tuple[Tensor, ...] = ()
    scratch: tuple[Tensor, ...] = ()

    def contents(self, device: torch.device) -> dict[MemoryContent, list[Tensor]]:
        """Return the tensors on a device by content: one for each storage, in the order of the module."""
        storages: dict[int, list[Tensor]] = defaultdict(list)
        declared: list[Tensor] = []
        others = [*self.kept]
        if self.module is not None:
            for path, tensor in named_tensors(self.module).items():
                is_declared = isinstance(path, str)
                (declared if is_declared else others).append(tensor)
        found: dict[MemoryContent, list[Tensor]] = {content: [] for content in MemoryContent}
        for tensor in declared:
            if tensor.device == device:
                storages[storage_key(tensor)].append(tensor)
        seen = set[int]()
        for key, tensors in storages.items():
            seen.add(key)
            found[MemoryContent.WEIGHTS if is_covered(tensors) else MemoryContent.KEPT].append(tensors[0])
        for content, extra in ((MemoryContent.KEPT, others), (MemoryContent.SCRATCH, self.scratch)):
            for tensor in extra:
                if tensor.device == device and (key := storage_key(tensor)) not in seen:
                    seen.add(key)
                    found[content].append(tensor)
        return found


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which stays while the storage is empty."""
    return int(tensor.untyped_storage()._cdata)


def named_tensors(module: nn.Module) -> Mapping[str | tuple[str, str], Tensor]:
    """Return all tensors of a module: parameters and buffers by path, others of its modules by (path, attribute).

    Tensors that several paths name appear under each.
    """
    named: dict[str | tuple[str, str], Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            for key, tensor in _tensors(name, value):
                named[path, key] = tensor
    return named


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an attribute that is one, or a list, tuple or dictionary of them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f"{name}.{index}", item
    elif isinstance(value, dict) and name not in ("_parameters", "_buffers"):
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                yield f"{name}.{key}", item


def is_covered(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors of one storage cover all its bytes, so that loading them again restores it."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    end = 0
    for first, last in spans:
        if first > end:
            return False
        end = max(end, last)
    return end >= tensors[0].untyped_storage().nbytes()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the end of its last element."""
    reach = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + reach * tensor.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAgain:
    """A tensor of a sleeping module, and its values from the files."""

    target: Tensor
    source: Tensor


def loaded_again(old: nn.Module, new: nn.Module, weights: frozenset[int]) -> list[LoadedAgain]:
    """Pair the tensors of a sleeping module with those of the same module that was loaded again.

    weights: storages of the old one that were dropped. Raises EngineError if the second load has other tensors.
    """
    before, after = named_tensors(old), named_tensors(new)
    pairs = []
    for path, target in before.items():
        if storage_key(target) not in weights:
            continue
        source = after.get(path)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            shown = "none" if source is None else f"{list(source.shape)} of {source.dtype}"
            raise EngineError(
                "the weights that were loaded again differ from those before the sleep",
                f"{path}: {list(target.shape)} of {target.dtype} before, {shown} now",
                "sleep at level 1, or report this to the author of the plugin",
            )
        pairs.append(LoadedAgain(target=target, source=source))
    return pairs
