"""Golden vectors, and models and caches for the tests. MSTAR_GOLDEN selects another set: a folder with `bagel/`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_bagel.checkpoint.config import VAE_FILE, Sizes, read_sizes
from mstar_bagel.model import Bagel
from mstar_bagel.nodes.autoencoder import CleanLatents, Pixels, VaeDecoder
from mstar_bagel.nodes.language import BagelLLM
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_bagel.plugin import mstar_models
from mstar_bagel.sources.tiny import write_tiny
from mstar_core.plugin import ModelSpec
from mstar_core.plugin.model import ModelContext

SPEC = mstar_models()[0]
CHECKPOINT = (
    "ema.safetensors",
    "ae.safetensors",
    "config.json",
    "llm_config.json",
    "vit_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
BRANCHES = ("main", "cfg_text", "cfg_img")


@dataclass(frozen=True)
class Golden:
    """One set of reference vectors; every size and case comes from its files."""

    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    @cached_property
    def cases(self) -> dict[str, Any]:
        return dict(self.json("cases.json"))

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the input images."""
        return tuple(self.cases["preprocess"])

    def png(self, name: str) -> bytes:
        return (self.folder / f"image_{name}.png").read_bytes()

    @property
    def paintings(self) -> tuple[str, ...]:
        """Names of the generation cases."""
        return tuple(name for name, case in self.cases.items() if isinstance(case, dict) and "output_hw" in case)

    def prompt(self, case: str) -> list[tuple[str, str]]:
        """Return the user's parts of a generation case, in order: ("image", name) or ("text", words)."""
        found = self.cases[case]
        given = found.get("inputs_in_order")
        if given is None:
            given = [*(f"image_{name}" for name in found.get("images", ())), found["prompt"]]
        names = {f"image_{name}": name for name in self.images}
        return [("image", names[part]) if part in names else ("text", part) for part in given]

    @property
    def has_decoder(self) -> bool:
        """Whether the set contains the weights of the autoencoder's decoder."""
        return any(name.startswith("decoder.") for name in self.tensors("ae"))


ROOT = os.environ.get("MSTAR_GOLDEN")
GOLDEN = Golden(Path(ROOT) / "bagel" if ROOT else Path(__file__).parent / "golden")


@dataclass(frozen=True)
class Built:
    """A checkpoint with its bound spec and its nodes, on the CPU in float32."""

    folder: Path
    spec: ModelSpec
    sizes: Sizes
    llm: BagelLLM
    vit: ImageFeatures
    encoder: CleanLatents
    decoder: Pixels


@dataclass
class BranchCache:
    """A minimal KVView of one sequence: keys and values of each layer, [tokens, kv_heads, head_dim]."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    position: int = 0
    writes: bool = True
    is_causal: bool = True

    @property
    def length(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def copy(self) -> BranchCache:
        return BranchCache(dict(self.keys), dict(self.values), self.position)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        if layer in self.keys:
            key, value = torch.cat([self.keys[layer], key]), torch.cat([self.values[layer], value])
        if self.writes:
            self.keys[layer], self.values[layer] = key, value
        rows, columns, groups = len(query), len(key), query.shape[1] // key.shape[1]
        mask = (
            torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
            if self.is_causal
            else None
        )
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        mixed = scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=mask, scale=scale)
        return mixed.transpose(0, 1)


class Run:
    """Runs the modules directly over caches of the tests, by the rules of the specification."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.llm = built.llm
        self.caches = {name: BranchCache() for name in BRANCHES}
        self.device = built.llm.vae2llm.weight.device

    def text(self, ids: Sequence[int], cache: BranchCache) -> Tensor:
        """Append text; return its normalized states."""
        cache.is_causal, cache.writes = True, True
        positions = torch.arange(cache.position, cache.position + len(ids), device=self.device)
        cache.position += len(ids)
        return self.llm(kv=cache, positions=positions, tokens=torch.tensor(ids, device=self.device))["hidden"]

    def image(self, cache: BranchCache, **ports: Tensor) -> Tensor | None:
        """Append an image; return its normalized states, if they are text's."""
        cache.is_causal, cache.writes = False, True
        (features,) = ports.values()
        positions = torch.full((len(features) + 2,), cache.position, device=self.device)
        cache.position += 1
        # As between nodes: float32 features of the autoencoder come to a model of another dtype.
        given = {name: each[None].to(self.llm.vae2llm.weight.dtype) for name, each in ports.items()}
        before = cache.copy()
        self.llm(kv=cache, positions=positions, **given)
        if "embeds" not in given:
            return None
        # A pass over an image ends in its last layer's keys and values: its states are computed here alone.
        before.is_causal, before.writes = False, True
        packed = self.llm._packed(given["embeds"])
        return self.llm.language_model.model.text(packed, positions, before)

    def velocity(self, x: Tensor, time: float, cache: BranchCache) -> Tensor:
        """Return the velocity [h, w, channels] of noisy latents at a flow time."""
        cache.is_causal, cache.writes = False, False
        positions = torch.full((x.shape[0] * x.shape[1] + 2,), cache.position, device=self.device)
        times = torch.tensor([[[time, 0.0, 0.0]]], device=self.device)
        return self.llm(kv=cache, positions=positions, latents=x[None], times=times)["velocity"][0]

    def greedy(self, count: int, cache: BranchCache) -> tuple[list[int], Tensor]:
        """Decode from the start id; return ids and the logits of each step."""
        ids, logits, last = [], [], self.built.sizes.ids.start
        for _ in range(count):
            logits.append(self.llm.head(self.text([last], cache))[0])
            last = int(logits[-1].argmax())
            ids.append(last)
        return ids, torch.stack(logits)

    def read(self, golden: Golden, case: str) -> Tensor | None:
        """Build the three caches of a generation case, by section 8.2; return the states of its thought, if any."""
        found, words, caches, ids = golden.cases[case], golden.cases["tokens"], self.caches, self.built.sizes.ids
        inputs = {name: each.to(self.device) for name, each in golden.tensors("preprocess").items()}

        def of(text: str) -> list[int]:
            return [ids.start, *words[text], ids.end]

        if "system_prompt" in found:
            for name in ("main", "cfg_img"):
                self.text(of(found["system_prompt"]), caches[name])
        for kind, value in golden.prompt(case):
            if kind == "text":
                caches["cfg_text"] = caches["main"].copy()
                self.text(of(value), caches["main"])
                self.text(of(value), caches["cfg_img"])
            else:
                encoder, vit = self.built.encoder, self.built.vit
                self.image(
                    caches["main"], latent_embeds=encoder(image=inputs[f"{value}.vae_input"][None])["features"][0]
                )
                self.image(caches["main"], embeds=vit(image=inputs[f"{value}.vit_input"][None])["features"][0])
                caches["cfg_text"] = caches["main"].copy()
        return self.text(of(found["think_text"]), caches["main"]) if "think_text" in found else None


def lay_out(golden: Golden, folder: Path) -> Path:
    """Write the golden model as a checkpoint folder. A decoder that the set lacks is random."""
    folder.mkdir(parents=True)
    for name in CHECKPOINT:
        shutil.copyfile(golden.folder / name, folder / name)
    if not golden.has_decoder:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            made = VaeDecoder(read_sizes(folder).vae).state_dict()
        save_file(
            {**golden.tensors("ae"), **{f"decoder.{name}": value for name, value in made.items()}}, folder / VAE_FILE
        )
    return folder


def model_of(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Bagel:
    spec = SPEC.bound(folder, {})
    return Bagel(ModelContext(spec=spec, folder=folder, device=torch.device(device), dtype=dtype))


def build(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Built:
    spec, model = SPEC.bound(folder, {}), model_of(folder, dtype, device)
    llm, vit, encoder, decoder = (
        model.get_submodule(spec.node(name)) for name in ("LLM", "vit_encoder", "vae_encoder", "vae_decoder")
    )
    assert isinstance(llm, BagelLLM)
    assert isinstance(vit, ImageFeatures)
    assert isinstance(encoder, CleanLatents)
    assert isinstance(decoder, Pixels)
    return Built(folder, spec, read_sizes(folder), llm, vit, encoder, decoder)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with a `painting` or `image` argument once for each case of the set."""
    for name, values in (("painting", GOLDEN.paintings), ("image", GOLDEN.images)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


@pytest.fixture(scope="session")
def golden() -> Golden:
    return GOLDEN


@pytest.fixture(scope="session")
def reference(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the golden model from a checkpoint folder."""
    return build(lay_out(golden, tmp_path_factory.mktemp("reference") / "checkpoint"))


@pytest.fixture
def checkpoint(golden: Golden, tmp_path: Path) -> Path:
    """Return a checkpoint folder that a test may damage."""
    return lay_out(golden, tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "bagel")


@pytest.fixture
def run(reference: Built) -> Run:
    return Run(reference)


@pytest.fixture
def decoded(golden: Golden) -> None:
    """Skip the test if the set has no decoder weights."""
    if not golden.has_decoder:
        pytest.skip("runs when MSTAR_GOLDEN names a set that contains the decoder")


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield
