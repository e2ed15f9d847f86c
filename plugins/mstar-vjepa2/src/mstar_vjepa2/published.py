"""Names of the published weights and where each goes. Read by the conformance check; loads no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import nn

from mstar_core.plugin.conformance import KeyMap
from mstar_vjepa2.checkpoint import names
from mstar_vjepa2.checkpoint.config import RELEASED_AC, released
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import Encoder
from mstar_vjepa2.nodes.pooler import Pooler
from mstar_vjepa2.nodes.predictor import MaskedPredictor
from mstar_vjepa2.plugin import WEIGHTS

CLASSES: Final = {"ssv2": 174, "diving48": 48}
"""Class counts of the published heads, by the end of the weights' name."""


def key_map() -> Mapping[str, KeyMap]:
    """Published names and the model's places, by weight set."""
    return {name: _base(name) for name in WEIGHTS} | {"ac": _ac()}


def _base(name: str) -> KeyMap:
    size = name if name == "vitg-384" else name.partition("-")[0]
    labels = CLASSES.get(name.rpartition("-")[2], 0)
    config = released(size)
    vit, depth = config.encoder.vit, config.pooler_layers if labels else 0
    with torch.device("meta"):
        nodes: dict[str, tuple[nn.Module, names.Rules]] = {
            "video_encoder": (Encoder(config.encoder), names.ENCODER),
            "predictor": (MaskedPredictor(config), names.PREDICTOR),
        }
        if labels:
            nodes["pooler"] = (Pooler(vit.width, vit.heads, depth, labels, vit.eps), names.POOLER)
    return _keys(names.hub_names(vit.layers, config.predictor.layers, depth), nodes, config.mask_tokens)


def _ac() -> KeyMap:
    with torch.device("meta"):
        nodes: dict[str, tuple[nn.Module, names.Rules]] = {
            "video_encoder": (Encoder(RELEASED_AC.encoder), names.ENCODER),
            "ac_predictor": (ActionPredictor(RELEASED_AC), names.ACTION),
        }
    layers, own = RELEASED_AC.encoder.vit.layers, RELEASED_AC.predictor.layers
    return _keys(names.official_ac_names(layers, own), nodes, 1)


def _keys(published: Iterable[str], nodes: Mapping[str, tuple[nn.Module, names.Rules]], mask_tokens: int) -> KeyMap:
    places = frozenset(f"{node}.{place}" for node, (module, _) in nodes.items() for place in module.state_dict())
    targets: dict[str, str | None] = {}
    for name in published:
        found = ((node, names.spot(names.plain(name), rules, mask_tokens)) for node, (_, rules) in nodes.items())
        # A name that no rule knows stays what it is, and the check finds that it has no place.
        targets[name] = next((f"{node}.{spot.target}" for node, spot in found if spot is not None), name)
    return KeyMap(targets=targets, places=places)
