"""Folder of the golden vectors, its checkpoints and cases. MSTAR_GOLDEN selects another set: one with `qwen3_tts/`.

The weights of the plugin's own part are drawn again: the reference model has random weights, one CPU generator per
file, in the order of their names. `golden/weights.json` lists a factor and an offset for each.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mstar_core.layers import load_weights
from mstar_qwen3tts.checkpoint.config import CODEC_FOLDER, DESIGN, TTSConfig, read_config
from mstar_qwen3tts.checkpoint.weights import NAMES, own_tensors
from mstar_qwen3tts.model import new_module

OWN: Final = Path(__file__).parent / "golden"
BUILT: Final = Path(__file__).parents[3] / "build" / "golden"
WEIGHTS: Final = "model.safetensors"
CHECKPOINTS: Final = ("custom_voice", "base")
SHARED: Final = ("vocab.json", "merges.txt", "tokenizer_config.json", "generation_config.json")
CLONE = "generate_voice_clone"


def golden_folder() -> Path:
    """Return the set of MSTAR_GOLDEN, or the plugin's own with weights."""
    root = os.environ.get("MSTAR_GOLDEN")
    if root:
        return Path(root) / "qwen3_tts"
    files = sorted(path for path in OWN.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    folder = BUILT / f"qwen3_tts-{digest[:16]}"
    if not folder.is_dir():
        BUILT.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=BUILT))
        _build(scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return folder


def _build(folder: Path) -> None:
    """Write the own set in the form of the whole one."""
    shutil.copytree(OWN, folder, dirs_exist_ok=True)
    recipe = json.loads((OWN / "weights.json").read_text())
    for name in CHECKPOINTS:
        for shared in SHARED:
            shutil.copyfile(OWN / shared, folder / name / shared)
        shutil.copytree(OWN / CODEC_FOLDER, folder / name / CODEC_FOLDER)
        for file in (f"{name}/{WEIGHTS}", f"{CODEC_FOLDER}/{WEIGHTS}"):
            place = folder / (file if file in recipe and file.startswith(name) else f"{name}/{file}")
            save_file(dict(_drawn(recipe[file], *recipe["eos_row"])), place)


def _drawn(recipe: dict[str, Any], eos: int, louder: float) -> Iterator[tuple[str, Tensor]]:
    """Draw the weights of a file. louder: factor of the head's row of the end of speech."""
    generator = torch.Generator().manual_seed(recipe["seed"])
    usage = torch.ones(1)
    for name, shape, kind, factor, offset in recipe["tensors"]:
        if kind == "c":
            yield name, torch.full(shape, factor)
            continue
        draw = torch.rand if kind == "u" else torch.randn
        value = draw(shape, generator=generator)
        if kind == "s":
            value = value * usage[:, None]
        elif kind == "h":
            value[eos] *= louder
        value = value * factor + offset
        usage = value if kind == "u" else usage
        yield name, value


FOLDER: Final = golden_folder()
MANIFEST: Final = json.loads((FOLDER / "manifest.json").read_text())
CASES: Final = tuple(sorted(path.stem.removeprefix("case_") for path in FOLDER.glob("case_*.safetensors")))


def tensors(name: str) -> dict[str, Tensor]:
    """Return the tensors of a file. Skips the test if the set lacks it."""
    path = FOLDER / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"{path.name} is not part of this golden set; MSTAR_GOLDEN names the whole one")
    return load_file(path)


@dataclass(frozen=True)
class Case:
    """One request of the set."""

    name: str

    @property
    def call(self) -> dict[str, Any]:
        call: dict[str, Any] = MANIFEST["cases"][self.name]["call"]
        return call

    @property
    def is_clone(self) -> bool:
        return str(self.call["method"]) == CLONE

    @property
    def folder(self) -> Path:
        """Folder of its checkpoint."""
        return FOLDER / ("base" if self.is_clone else "custom_voice")

    @functools.cached_property
    def config(self) -> TTSConfig:
        return config_of(self.folder.name)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return tensors(f"case_{self.name}")

    @property
    def kind(self) -> str | None:
        """Kind of checkpoint that the case replaces that of its folder by."""
        return DESIGN if "voice_design" in str(self.call["method"]) else None

    @property
    def recording(self) -> Tensor:
        """Samples of its recording, float32 [n] at 24 kHz."""
        key, _, file = str(self.call["ref_audio"]).partition(" of ")
        return tensors(file.removesuffix(".safetensors"))[key].flatten()


@functools.cache
def config_of(folder: str) -> TTSConfig:
    """Return the sizes of a checkpoint of the set."""
    return read_config(FOLDER / folder)


@functools.cache
def node(folder: str, name: str) -> Any:
    """Return a node with its weights, an `nn.Module`."""
    if not (FOLDER / folder / "model.safetensors").is_file():
        pytest.skip(f"{folder} is not part of this golden set; MSTAR_GOLDEN names the whole one")
    module = new_module(name, config_of(folder))
    if name in NAMES:
        load_weights(module, own_tensors(FOLDER / folder, name), NAMES[name])
    return module.eval().requires_grad_(False)


def close(actual: Tensor, expected: Tensor, limit: float) -> None:
    """Check values of one form against a limit on their difference."""
    torch.testing.assert_close(actual.reshape(expected.shape), expected, atol=limit, rtol=0)
