"""Golden vectors and the models built from them. MSTAR_GOLDEN: a folder with another set in `orpheus/`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin import ModelSpec
from mstar_core.plugin.model import ModelContext
from mstar_orpheus.checkpoint.config import IDS_PER_FRAME
from mstar_orpheus.llama import Llama
from mstar_orpheus.model import Orpheus
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.sources.tiny import write_tiny
from mstar_orpheus.vocoder.node import Vocoder


@dataclass(frozen=True)
class Golden:
    """One set of reference vectors. Every size and sampling value comes from its files."""

    folder: Path

    @classmethod
    def find(cls) -> Golden:
        """Return the set of MSTAR_GOLDEN, or the one beside the tests."""
        root = os.environ.get("MSTAR_GOLDEN")
        return cls(Path(root) / "orpheus" if root else Path(__file__).parent / "golden")

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    @property
    def lm(self) -> dict[str, Tensor]:
        return self.tensors("llm_expected")

    @property
    def snac(self) -> dict[str, Tensor]:
        return self.tensors("snac_expected")

    @property
    def prompts(self) -> list[int]:
        """Indices of the language model's prompts."""
        return indices(self.lm, "prompt_")

    @property
    def sequences(self) -> list[int]:
        """Indices of the vocoder's id sequences."""
        return indices(self.snac, "audio_ids_")

    @property
    def penalty(self) -> float:
        """The repetition penalty of the set."""
        return float(self.json("config.json")["sampling"]["repetition_penalty"])

    @property
    def frame_samples(self) -> int:
        """Samples of one frame."""
        return int(self.json("config.json")["samples_per_frame"])

    def ids(self, frames: int) -> Tensor:
        """Return the longest id sequence. Skip the test if it has fewer frames."""
        ids = max((self.snac[f"audio_ids_{index}"] for index in self.sequences), key=len)
        if len(ids) < frames * IDS_PER_FRAME:
            pytest.skip(f"runs when MSTAR_GOLDEN names a set with a sequence of {frames} frames")
        return ids


def indices(tensors: dict[str, Tensor], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in tensors if name.startswith(prefix))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with a `prompt` or `sequence` argument once for each index of the set."""
    for name in ("prompt", "sequence"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, getattr(Golden.find(), f"{name}s"))


@dataclass(frozen=True)
class Built:
    """A checkpoint with its bound spec and both nodes, on the CPU in float32."""

    folder: Path
    spec: ModelSpec
    llama: Llama
    vocoder: Vocoder


class DenseCache:
    """A minimal KVView: one sequence, keys and values in one tensor per layer."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        if layer in self._layers:
            before_key, before_value = self._layers[layer]
            key, value = torch.cat([before_key, key]), torch.cat([before_value, value])
        self._layers[layer] = (key, value)
        rows, columns, groups = len(query), len(key), query.shape[1] // key.shape[1]
        visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        mixed = scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=visible, scale=scale)
        return mixed.transpose(0, 1)


def lay_out(golden: Golden, folder: Path) -> Path:
    """Write the golden models as an official checkpoint: folders `lm` and `snac`."""
    (folder / "lm").mkdir(parents=True)
    (folder / "snac").mkdir()
    ids = golden.json("config.json")
    keys = ("start_token_id", "end_token_ids", "stop_token_id", "audio_token_offset")
    config = golden.json("llm_config.json") | {"orpheus": {key: ids[key] for key in keys}}
    (folder / "lm" / "config.json").write_text(json.dumps(config))
    shutil.copy(golden.folder / "llm_weights.safetensors", folder / "lm" / "model.safetensors")
    shutil.copy(golden.folder / "snac_config.json", folder / "snac" / "config.json")
    # The set's own pytorch_model.bin holds the same tensors.
    torch.save(load_file(golden.folder / "snac_weights.safetensors"), folder / "snac" / "pytorch_model.bin")
    for path in folder.rglob("*.*"):
        path.chmod(0o644)
    return folder


def build(folder: Path) -> Built:
    spec = ORPHEUS.bound(folder, {})
    model = Orpheus(ModelContext(spec=spec, folder=folder, device=torch.device("cpu"), dtype=torch.float32))
    llama, vocoder = (model.get_submodule(spec.node(name)) for name in ("LLM", "snac_decoder"))
    assert isinstance(llama, Llama)
    assert isinstance(vocoder, Vocoder)
    return Built(folder, spec, llama, vocoder)


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden.find()


@pytest.fixture(scope="session")
def reference(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The golden models, read from the official layout."""
    return build(lay_out(golden, tmp_path_factory.mktemp("reference") / "checkpoint"))


@pytest.fixture
def checkpoint(golden: Golden, tmp_path: Path) -> Path:
    """A checkpoint folder that a test may modify."""
    return lay_out(golden, tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "orpheus")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Built:
    return build(tiny_folder)


@pytest.fixture
def dense_cache() -> DenseCache:
    return DenseCache()


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield
