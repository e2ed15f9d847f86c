"""Golden vectors of the speech model for system tests: a checkpoint folder and the expected sound."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin import ModelSpec
from mstar_core.plugin.model import ModelContext
from mstar_orpheus.llama import Llama
from mstar_orpheus.model import Orpheus
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.vocoder.node import Vocoder, to_pcm16
from tests.runtime.deployment import REPO


@dataclass(frozen=True)
class Golden:
    """One set of reference vectors. Every size and sampling value comes from its files."""

    folder: Path

    @classmethod
    def find(cls) -> Golden:
        """Return the set of MSTAR_GOLDEN, or the plugin's own."""
        root = os.environ.get("MSTAR_GOLDEN")
        return cls(Path(root) / "orpheus" if root else REPO / "plugins" / "mstar-orpheus" / "tests" / "golden")

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    @cached_property
    def lm(self) -> dict[str, Tensor]:
        return load_file(self.folder / "llm_expected.safetensors")

    @cached_property
    def snac(self) -> dict[str, Tensor]:
        return load_file(self.folder / "snac_expected.safetensors")

    @property
    def config(self) -> Any:
        return self.json("config.json")

    @property
    def frame_samples(self) -> int:
        return int(self.config["samples_per_frame"])

    @property
    def penalty(self) -> float:
        """The repetition penalty of the set."""
        return float(self.config["sampling"]["repetition_penalty"])

    @property
    def prompts(self) -> tuple[int, ...]:
        """Indices of the prompts, shortest first."""
        names = [name for name in self.lm if name.startswith("prompt_")]
        return tuple(int(name.removeprefix("prompt_")) for name in sorted(names, key=lambda name: len(self.lm[name])))

    @property
    def sequences(self) -> tuple[int, ...]:
        """Indices of the vocoder's id sequences, shortest first."""
        names = [name for name in self.snac if name.startswith("audio_ids_")]
        return tuple(int(name.removeprefix("audio_ids_")) for name in sorted(names, key=lambda x: len(self.snac[x])))

    def prompt(self, index: int) -> list[int]:
        return [int(token) for token in self.lm[f"prompt_{index}"]]

    def greedy(self, index: int, *, is_penalised: bool = False) -> list[int]:
        return [int(token) for token in self.lm[f"greedy_{'penalised_' if is_penalised else ''}tokens_{index}"]]

    def lay_out(self, folder: Path) -> Path:
        """Write the models as an official checkpoint with folders `lm` and `snac`. Returns `folder`."""
        (folder / "lm").mkdir(parents=True)
        (folder / "snac").mkdir()
        ids = self.json("config.json")
        keys = ("start_token_id", "end_token_ids", "stop_token_id", "audio_token_offset")
        config = self.json("llm_config.json") | {"orpheus": {key: ids[key] for key in keys}}
        (folder / "lm" / "config.json").write_text(json.dumps(config))
        for name, target in (
            ("llm_weights.safetensors", "lm/model.safetensors"),
            ("snac_config.json", "snac/config.json"),
        ):
            shutil.copyfile(self.folder / name, folder / target)
        # The set's own pytorch_model.bin holds the same tensors.
        torch.save(load_file(self.folder / "snac_weights.safetensors"), folder / "snac" / "pytorch_model.bin")
        return folder


GOLDEN: Final = Golden.find()
PROMPTS: Final = GOLDEN.prompts
SHORT, LONG = PROMPTS[0], PROMPTS[-1]
"""Indices of the shortest and the longest prompt."""
SEQUENCES: Final = GOLDEN.sequences
WINDOW, STRIDE = int(GOLDEN.config["window_tokens"]), int(GOLDEN.config["stride_tokens"])


def prompt_of(number: int) -> int:
    """Return the index of a prompt for any number, in turn."""
    return PROMPTS[number % len(PROMPTS)]


@dataclass(frozen=True)
class Built:
    """A checkpoint's bound spec and both of its nodes, on the CPU in float32."""

    spec: ModelSpec
    llama: Llama
    vocoder: Vocoder

    @classmethod
    def load(cls, folder: Path) -> Built:
        spec = ORPHEUS.bound(folder, {})
        model = Orpheus(ModelContext(spec=spec, folder=folder, device=torch.device("cpu"), dtype=torch.float32))
        llama, vocoder = (model.get_submodule(spec.node(name)) for name in ("LLM", "snac_decoder"))
        assert isinstance(llama, Llama)
        assert isinstance(vocoder, Vocoder)
        return cls(spec, llama, vocoder)

    @property
    def vocab(self) -> int:
        return self.llama.model.embed_tokens.num_embeddings

    @property
    def stop_id(self) -> int:
        loop: Any = self.spec.walk("decode")[1]
        return int(loop.stop.ids[0])

    def continued(self, prompt: list[int], count: int, penalty: float = 1.0) -> list[int]:
        """Return the ids that follow a prompt, by arg-max, one at a time and without pages."""
        cache, ids, tokens = DenseCache(), list(prompt), torch.tensor(prompt)
        with torch.inference_mode():
            while len(ids) < len(prompt) + count:
                positions = torch.arange(len(ids) - len(tokens), len(ids))
                row = self.llama.head(self.llama(kv=cache, positions=positions, tokens=tokens)["hidden"][-1:])[0]
                seen = torch.tensor(sorted(set(ids)))
                known = row[seen]
                row[seen] = torch.where(known > 0, known / penalty, known * penalty)
                ids.append(int(row.argmax()))
                tokens = torch.tensor(ids[-1:])
        return ids[len(prompt) :]

    def sound(self, ids: list[int]) -> bytes:
        """Return the samples of a stream of ids without noise: the second frame of each window of accepted ids."""
        accept = self.spec.streams[0].accept
        assert accept is not None
        kept = torch.tensor([token for token in ids if token in accept])
        if len(kept) < WINDOW:
            return b""
        with torch.inference_mode():
            samples = self.vocoder.decode(kept.unfold(0, WINDOW, STRIDE), None)
            frame = samples.shape[1] // (WINDOW // STRIDE)
            return bytes(to_pcm16(samples[:, frame : 2 * frame]).contiguous().numpy())


class DenseCache:
    """A minimal cache: one sequence, keys and values in one tensor per layer."""

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
