"""The thinker's golden cases, and a minimal cache to run it without an engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin.model import ModelContext
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.model import Qwen3Omni
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.thinker.thinker import Thinker

from .golden_set import golden_folder

FOLDER = golden_folder()
CASES = sorted(path.stem.removeprefix("case_") for path in FOLDER.glob("case_*.safetensors"))
STATES = 2e-3
"""Tolerance of the set for hidden states and logits."""

needs_weights = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").exists() or not CASES, reason="needs the golden set in MSTAR_GOLDEN"
)


@dataclass(frozen=True)
class Case:
    """One request of the set: its prompt as the thinker reads it."""

    tensors: dict[str, Tensor]
    tokens: Tensor
    positions: Tensor
    embeds: Tensor
    deepstack: Tensor

    @property
    def answer(self) -> Tensor:
        return self.tensors["thinker_tokens"]


class DenseCache:
    """A minimal KVView of several sequences. lengths: new tokens of each in the next forward."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.lengths: list[int] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        lengths = self.lengths or [len(query)]
        parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._one((layer, index), *part) for index, part in enumerate(parts)])

    def _one(self, at: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if at in self._layers:
            before_key, before_value = self._layers[at]
            key, value = torch.cat([before_key, key]), torch.cat([before_value, value])
        self._layers[at] = (key, value)
        groups = query.shape[1] // key.shape[1]
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        return scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=visible).transpose(0, 1)


def read(name: str) -> Case:
    found = load_file(FOLDER / f"case_{name}.safetensors")
    tokens, levels = found["in.input_ids"], len(read_config(FOLDER).vision.deepstack)
    ids = read_config(FOLDER).ids
    deepstack = torch.zeros(levels, len(tokens), found["thinker_inputs_embeds"].shape[-1])
    for kind, pad in (("image", ids.image_pad), ("video", ids.video_pad)):
        for level in range(levels):
            if f"{kind}_deepstack.{level}" in found:
                deepstack[level, tokens == pad] = found[f"{kind}_deepstack.{level}"]
    return Case(found, tokens, found["thinker_position_ids"].float(), found["thinker_inputs_embeds"], deepstack)


def prefill(thinker: Thinker, case: Case, cache: DenseCache, cuts: list[int]) -> dict[str, Tensor]:
    parts = [
        thinker(
            kv=cache, positions=case.positions[:, a:b].contiguous(), tokens=case.tokens[a:b], embeds=case.embeds[a:b],
            deepstack=case.deepstack[:, a:b],
        )
        for a, b in itertools.pairwise([0, *cuts, len(case.tokens)])
    ]  # fmt: skip
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def golden_thinker() -> Thinker:
    """The thinker with the weights of the set, on the CPU in float32."""
    (spec,) = mstar_models()
    context = ModelContext(spec=spec, folder=FOLDER, device=torch.device("cpu"), dtype=torch.float32)
    built = Qwen3Omni(context).get_submodule(spec.node("Thinker"))
    assert isinstance(built, Thinker)
    return built
