"""Adapter folders in PEFT's layout: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mstar_core.errors import WeightsError
from mstar_core.weights.adapter import Adapter
from tests.fakes.adapters import write_folder

STEM = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{STEM}.lora_A.weight": torch.ones(2, 8), f"{STEM}.lora_B.weight": torch.ones(6, 2)}
VALUES = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}


def test_an_adapter_is_read_under_the_names_of_its_base(tmp_path: Path) -> None:
    adapter = Adapter.read(write_folder(tmp_path, PAIR, VALUES))
    (found,) = adapter.weights.items()
    assert found[0] == "model.layers.0.self_attn.q_proj"
    assert (found[1].a.shape, found[1].b.shape, found[1].scale) == ((2, 8), (6, 2), 4.0)
    assert (adapter.rank, adapter.base) == (2, "base")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type LOHA"),
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights pissa_niter_16"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target module 'lm_head'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write_folder(tmp_path, PAIR, VALUES, changes)
    with pytest.raises(WeightsError, match="is not supported") as raised:
        Adapter.read(folder)
    assert words in raised.value.title
    assert raised.value.hint


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{STEM}.lora_A.weight": torch.ones(2, 8)}, "has only one of lora_A and lora_B"),
        ({**PAIR, f"{STEM}.lora_B.weight": torch.ones(6, 3)}, "does not fit together"),
        ({**PAIR, "base_model.model.lm_head.lora_embedding_A": torch.ones(2, 2)}, "lora_embedding_A"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}, "target module 'lm_head'"),
        ({}, "contains no LoRA tensors"),
    ],
)
def test_tensors_that_are_no_whole_adapter_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    folder = write_folder(tmp_path, tensors, VALUES)
    with pytest.raises(WeightsError) as raised:
        Adapter.read(folder)
    assert words in raised.value.title


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is no LoRA adapter") as raised:
        Adapter.read(tmp_path / "missing")
    assert "adapter_config.json" in raised.value.hint
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(WeightsError, match="has no alpha"):
        Adapter.read(tmp_path)
