"""Names of the tensors in an official checkpoint, and their places in the nodes. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mstar_core.plugin.conformance import KeyMap
from mstar_qwen3tts.checkpoint.config import BASE, SpeakerSizes, TTSConfig
from mstar_qwen3tts.checkpoint.weights import NAMES

Shape = tuple[int, ...]

OFFICIAL_BASE = replace(
    TTSConfig(), kind=BASE, voices={}, dialects={}, speaker=replace(SpeakerSizes(), output=TTSConfig().talker.width)
)
"""Sizes of Qwen/Qwen3-TTS-12Hz-1.7B-Base."""


def places(config: TTSConfig) -> Mapping[str, Mapping[str, Shape]]:
    """Return the shapes of the parameters of each node with weights, by name."""
    import torch

    from mstar_qwen3tts.model import new_module

    found = {}
    for node in NAMES:
        if node == "VoiceEncoder" and config.speaker is None:
            continue
        with torch.device("meta"):
            module = new_module(node, config)
        found[node] = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    return found


def shapes(config: TTSConfig) -> Mapping[str, Shape]:
    """Return the shape of each tensor that a deployment reads, by its name in the checkpoint."""
    return {_published(node, name): shape for node, own in places(config).items() for name, shape in own.items()}


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and the nodes' parameters, by weight set."""
    found = {}
    for entry, config in (("tts", TTSConfig()), ("base", OFFICIAL_BASE)):
        own = [(node, name) for node, names in places(config).items() for name in names]
        targets = {_published(node, name): f"{node}.{name}" for node, name in own}
        found[entry] = KeyMap(targets=targets, places=frozenset(targets.values()))
    return found


def _published(node: str, name: str) -> str:
    return {"Talker": "talker.", "Codec": "decoder."}.get(node, "") + name
