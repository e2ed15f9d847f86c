"""Modules of a model's nodes with the names of their weights: loading, random checkpoints and key tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from mstar_core.errors import WeightsError
from mstar_core.plugin.conformance import KeyMap
from mstar_core.weights.building import building
from mstar_core.weights.checkpoint import Checkpoint, NameMap, load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from mstar_core.plugin.model import ModelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The module of one node.

    make: builds it. prefixes: published prefix -> prefix in the module, the first that fits; tensors that fit none
    belong to other parts. Two published prefixes may have one target, for checkpoints written in two ways; the first
    one is used to write.
    """

    make: Callable[[], nn.Module]
    prefixes: Mapping[str, str]

    def names(self, published: Collection[str]) -> NameMap:
        """Return the mapping of a checkpoint's names, which ignores those of other parts."""
        others = tuple(sorted(name for name in published if not name.startswith(tuple(self.prefixes))))
        return NameMap(prefixes=self.prefixes, ignore=others)

    def published(self, name: str) -> str:
        """Return the published name of a parameter. Raises WeightsError if no prefix fits."""
        for prefix, target in self.prefixes.items():
            if name.startswith(target):
                return prefix + name.removeprefix(target)
        raise WeightsError(f"parameter {name} has no published name", hint="add its prefix to the part")


def load_part(part: ModelPart, ctx: ModelContext, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a part with its weights, on the context's device. dtype: by default that of the context.

    Raises WeightsError without a checkpoint folder, and for missing or unknown tensors.
    """
    files = Checkpoint.find(checkpoint_folder(ctx))
    with building(ctx.device, dtype or ctx.dtype):
        module = part.make()
    load_weights(module, files, part.names(files.file_of), ctx.progress)
    return module.eval().requires_grad_(False)


def checkpoint_folder(ctx: ModelContext) -> Path:
    """Return the folder of the weights. Raises WeightsError if there is none."""
    if ctx.folder is None:
        name = ctx.spec.name
        raise WeightsError(f"{name} has no checkpoint folder", hint=f"use --weights DIR, or start {name}:tiny")
    return ctx.folder


def random_weights(parts: Mapping[str, ModelPart], seed: int, gains: Mapping[str, float]) -> dict[str, Tensor]:
    """Return weights by published name, equal on every machine. gains: factors by the end of a name.

    Matrices keep the scale of their input, norms are close to one. Widened heads (a gain of 3) keep the most likely id
    apart from the next, so that rounding cannot change it.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for part in parts.values():
        for name, place in part.make().state_dict().items():
            drawn = torch.randn(place.shape, generator=generator)
            if place.dim() < 2:
                drawn = 0.05 * drawn + float("norm" in name and name.endswith("weight"))
            else:
                drawn = drawn * place[0].numel() ** -0.5
            gain = next((factor for end, factor in gains.items() if name.endswith(end)), 1.0)
            weights[part.published(name)] = drawn * gain
    return weights


def key_map(name: str, parts: Mapping[str, ModelPart]) -> Mapping[str, KeyMap]:
    """Return the table of one set of weights for the check `key-map`, written from the parts.

    A tensor that two parts read counts once. Compare the names with the index of the published checkpoint.
    """
    targets = dict(_places(parts))
    return {name: KeyMap(targets=targets, places=frozenset(targets.values()))}


def _places(parts: Mapping[str, ModelPart]) -> Iterator[tuple[str, str]]:
    for node, part in parts.items():
        with torch.device("meta"):
            module = part.make()
        for name in module.state_dict():
            yield part.published(name), f"{node}.{name}"
