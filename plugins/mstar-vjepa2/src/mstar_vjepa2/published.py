"""Names and shapes of the published weights, and their places in the modules. Loads no weights.

The conformance check reads `key_map`; tiny checkpoints and benchmarks draw random weights of the published shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from mstar_core.plugin.conformance import KeyMap
from mstar_vjepa2.checkpoint import names
from mstar_vjepa2.checkpoint.config import RELEASED_AC, ActionConfig, BaseConfig, released
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import Encoder
from mstar_vjepa2.nodes.pooler import Pooler
from mstar_vjepa2.nodes.predictor import MaskedPredictor
from mstar_vjepa2.plugin import WEIGHTS

CLASSES: Final = {"ssv2": 174, "diving48": 48}
"""Class counts of the published heads, by the suffix of the weight set's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """Tensor names of a checkpoint, and the modules (on the meta device) and name rules of its nodes."""

    tensors: tuple[str, ...]
    nodes: Mapping[str, tuple[nn.Module, names.Rules]]
    mask_tokens: int = 1

    def key_map(self) -> KeyMap:
        """Return the place of each published name. A name without a matching rule maps to itself."""
        modules = {node: module for node, (module, _) in self.nodes.items()}
        places = frozenset(f"{node}.{place}" for node, module in modules.items() for place in module.state_dict())
        targets: dict[str, str | None] = {}
        for name in self.tensors:
            target = self._spot(name)
            targets[name] = f"{target[0]}.{target[1].target}" if target else name
        return KeyMap(targets=targets, places=places)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each published tensor. Raises ValueError for a name without a place."""
        held = {node: module.state_dict() for node, (module, _) in self.nodes.items()}
        shapes = {}
        for name in self.tensors:
            place = self._spot(name)
            if place is None:
                raise ValueError(f"{name} has no place in the model")
            node, spot = place
            shapes[name] = tuple(spot.part_of(held[node][spot.target]).shape)
        return shapes

    def _spot(self, name: str) -> tuple[str, names.Spot] | None:
        plain = names.plain(name)
        places = ((node, names.spot(plain, rules, self.mask_tokens)) for node, (_, rules) in self.nodes.items())
        return next(((node, spot) for node, spot in places if spot is not None), None)


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and the model's places, by weight set."""
    names_by_key = {}
    for name in WEIGHTS:
        size = name if name == "vitg-384" else name.partition("-")[0]
        labels = CLASSES.get(name.rpartition("-")[2], 0)
        names_by_key[name] = base_weights(replace(released(size), labels=labels)).key_map()
    return {**names_by_key, "ac": action_weights(RELEASED_AC).key_map()}


def base_weights(config: BaseConfig) -> PublishedWeights:
    """Return the weights of a V-JEPA 2 checkpoint in the hub's layout; with labels, those of a classifier."""
    vit, depth = config.encoder.vit, config.pooler_layers if config.labels else 0
    with torch.device("meta"):
        nodes: dict[str, tuple[nn.Module, names.Rules]] = {
            "video_encoder": (Encoder(config.encoder), names.ENCODER),
            "predictor": (MaskedPredictor(config), names.PREDICTOR),
        }
        if config.labels:
            nodes["pooler"] = (Pooler(vit.width, vit.heads, depth, config.labels, vit.eps), names.POOLER)
    published = names.hub_names(vit.layers, config.predictor.layers, depth)
    return PublishedWeights(tensors=tuple(published), nodes=nodes, mask_tokens=config.mask_tokens)


def action_weights(config: ActionConfig) -> PublishedWeights:
    """Return the weights of a V-JEPA 2-AC checkpoint under their official names."""
    with torch.device("meta"):
        nodes: dict[str, tuple[nn.Module, names.Rules]] = {
            "video_encoder": (Encoder(config.encoder), names.ENCODER),
            "ac_predictor": (ActionPredictor(config), names.ACTION),
        }
    published = names.official_ac_names(config.encoder.vit.layers, config.predictor.layers)
    return PublishedWeights(tensors=tuple(published), nodes=nodes)
