"""Golden vectors and the nodes that they are compared with. MSTAR_GOLDEN selects another set: a folder with `wan22`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mstar_core.parallel.shards import WHOLE, Shard
from mstar_wan22.checkpoint.config import Sizes, _text, _transformer, _vae, read_sizes
from mstar_wan22.checkpoint.weights import load
from mstar_wan22.nodes.media import Frames, ImageLatents
from mstar_wan22.nodes.text import TextEncoder
from mstar_wan22.nodes.transformer import Denoiser, Transformer, keep_floats
from mstar_wan22.nodes.vae import Decoder, Encoder

OWN = Path(__file__).parent / "golden"
BORROWED = ("text_encoder", "tokenizer", "vae")
"""Parts that a checkpoint without them takes from the text to video one, as the official repositories share them."""


@dataclass(frozen=True)
class Golden:
    """One set of reference vectors; every size and case comes from its files."""

    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a file. Skips the test if the set lacks it."""
        path = self.folder / f"{name}.safetensors"
        return (
            load_file(path) if path.is_file() else pytest.skip(f"runs when MSTAR_GOLDEN names a set with {path.name}")
        )

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    @cached_property
    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """`model_index.json` of each checkpoint, by folder name."""
        found = sorted(path.parent.name for path in self.folder.glob("*/model_index.json"))
        return {name: self.json(f"{name}/model_index.json") for name in found}

    def of_kind(self, *, expands: bool, part: str = "text_encoder") -> str:
        """Return the checkpoint of this kind that has a part of its own. Skips the test if there is none."""
        kinds = {name for name, index in self.checkpoints.items() if index["expand_timesteps"] is expands}
        found = next((name for name in sorted(kinds) if self.has(f"{name}/{part}")), None)
        return found or pytest.skip(f"runs when MSTAR_GOLDEN names a set with {part} of expand_timesteps {expands}")

    def part(self, checkpoint: str, part: str) -> Path:
        """Return the checkpoint's folder that holds a part."""
        if part in BORROWED and not self.has(f"{checkpoint}/{part}"):
            checkpoint = self.of_kind(expands=False, part=part)
        return self.folder / checkpoint

    def text_encoder(self, checkpoint: str) -> TextEncoder:
        folder = self.part(checkpoint, "text_encoder")
        module = TextEncoder(_text(folder / "text_encoder/config.json"))
        load(module, "text_encoder", folder, None)
        return module

    def transformer(self, checkpoint: str, node: str = "transformer", shard: Shard = WHOLE) -> Transformer:
        folder = self.folder / checkpoint
        module = Transformer(_transformer(folder / node / "config.json"), shard)
        keep_floats(module)
        load(module, node, folder, None)
        return module

    def encoder(self, checkpoint: str) -> Encoder:
        folder = self.part(checkpoint, "vae")
        module = Encoder(_vae(folder / "vae/config.json"))
        load(module, "vae_encoder", folder, None)
        return module

    def decoder(self, checkpoint: str) -> Decoder:
        folder = self.part(checkpoint, "vae")
        module = Decoder(_vae(folder / "vae/config.json"))
        load(module, "vae_decoder", folder, None)
        return module


ROOT = os.environ.get("MSTAR_GOLDEN")
GOLDEN = Golden(Path(ROOT) / "wan22" if ROOT else OWN)


def whole_folder(checkpoint: str, folder: Path) -> Path:
    """Return a folder with every part of a checkpoint, borrowed ones linked."""
    for path in (GOLDEN.folder / checkpoint).iterdir():
        (folder / path.name).symlink_to(path.resolve())
    for part in BORROWED:
        if not (folder / part).exists():
            (folder / part).symlink_to((GOLDEN.part(checkpoint, part) / part).resolve())
    return folder


def image_node(golden: Golden, checkpoint: str, sizes: Sizes) -> ImageLatents:
    module = ImageLatents(sizes)
    load(module, "vae_encoder", golden.part(checkpoint, "vae"), None)
    return module


def frame_node(golden: Golden, checkpoint: str, sizes: Sizes) -> Frames:
    module = Frames(sizes.vae, expands=sizes.expands)
    load(module, "vae_decoder", golden.part(checkpoint, "vae"), None)
    return module


def denoisers(golden: Golden, checkpoint: str, sizes: Sizes) -> dict[str, Denoiser]:
    names = {"high": "transformer", "low": "transformer_2"} if sizes.has_experts else {"high": "transformer"}
    return {
        expert: Denoiser(golden.transformer(checkpoint, name), expands=sizes.expands) for expert, name in names.items()
    }


def close(actual: Tensor, expected: Tensor, limit: float) -> None:
    """Compare with an absolute limit, and shapes and finite values too."""
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=0)


__all__ = ["GOLDEN", "close", "denoisers", "frame_node", "image_node", "read_sizes", "whole_folder"]
