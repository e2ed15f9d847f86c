"""Parity with transformers in float32: greedy ids and log-probabilities, over the paged cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mstar_core.engine.attention import backend, make_pools
from mstar_core.engine.steps.attention import AttentionMetadata
from mstar_core.errors import WeightsError
from mstar_core.layers.quantize import quantize
from mstar_core.plugin.model import ModelContext
from mstar_llm.checkpoint.config import read_config
from mstar_llm.model import Llm
from mstar_llm.plugin import llm

from .reference import CASES, greedy, write_checkpoint

PAGE = 4
PROMPT = [3, 17, 58, 9, 44, 21, 80, 5, 33, 62, 71, 12, 90, 28, 46]
COUNT = 12


class Cached:
    """A model with one sequence in its cache."""

    def __init__(self, folder: Path) -> None:
        spec = llm(read_config(folder))
        (node,) = spec.nodes
        device = torch.device("cpu")
        ctx = ModelContext(spec=spec, folder=folder, device=device, dtype=torch.float32)
        self.module: Any = Llm(ctx).get_submodule(node)
        assert node.kv is not None
        pools = make_pools(node.kv, 16, PAGE, torch.float32, device)
        self._attention = backend("torch", pools, PAGE, node.kv.windows)
        self._tables = np.arange(16, dtype=np.int32)[None]
        self._length = 0

    def read(self, ids: list[int]) -> Tensor:
        """Append ids and return the log-probabilities behind the last one: float32 [vocab]."""
        before = np.array([self._length])
        metadata = AttentionMetadata.of(np.array([0]), before, self._tables, np.array([len(ids)]))
        positions = torch.arange(self._length, self._length + len(ids))
        with torch.inference_mode():
            hidden = self.module(kv=self._attention.plan(metadata), positions=positions, tokens=torch.tensor(ids))[
                "hidden"
            ]
            logits = self.module.head(hidden[-1:])[0]
        self._length += len(ids)
        return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("first", [len(PROMPT), 6], ids=["whole", "in pieces"])
def test_greedy_ids_and_log_probabilities_are_those_of_transformers(name: str, first: int, tmp_path: Path) -> None:
    """The prompt is read as a whole, or in two passes over the cache; then decode steps go on."""
    expected_ids, expected = greedy(write_checkpoint(CASES[name], tmp_path), PROMPT, COUNT)
    cached = Cached(tmp_path)
    for piece in (PROMPT[:first], PROMPT[first:]):
        if piece:
            scores = cached.read(piece)
    ids = []
    for number in range(COUNT):
        torch.testing.assert_close(scores, expected[number], atol=1e-3, rtol=0)
        ids.append(int(scores.argmax()))
        scores = cached.read(ids[-1:])
    assert ids == expected_ids


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "opt"),
        ("hidden_act", "relu"),
        ("mlp_bias", True),
        ("num_attention_heads", 0),
        ("rms_norm_eps", "x"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(key: str, value: Any, tmp_path: Path) -> None:

    write_checkpoint(CASES["llama"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(WeightsError, match=key):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mistral with a window", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("gemma3", {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
    ],
)
def test_older_configs_without_layer_types_have_the_same_windows(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(CASES[name], tmp_path, **fields)
    windows = read_config(tmp_path).windows
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    newer = ("layer_types", "sliding_window_pattern", "_sliding_window_pattern")
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in newer}))
    assert read_config(tmp_path).windows == windows
    assert any(windows)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_float8_weights_give_nearly_the_same_log_probabilities(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(CASES[name], tmp_path)
    _, expected = greedy(model, PROMPT, 1)
    cached = Cached(tmp_path)
    report = quantize(cached.module, "fp8")
    assert set(report.kinds) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    difference = (cached.read(PROMPT) - expected[0]).abs()
    assert 0 < float(difference.mean()) < 0.5


def test_the_text_model_of_a_checkpoint_that_reads_images_too(tmp_path: Path) -> None:
    """The layout of Gemma 3 from 4B on: nested config without common values, prefixed names, other models beside."""
    fields = {"rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
    _, expected = greedy(write_checkpoint(CASES["gemma3"], tmp_path, **fields), PROMPT, 1)
    weights: dict[str, Tensor] = {"vision_tower.patches.weight": torch.zeros(2, 2)}
    for path in tmp_path.glob("*.safetensors"):
        weights |= {f"language_model.{name}": value for name, value in load_file(path).items()}
        path.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(weights, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    for key in ("rms_norm_eps", "query_pre_attn_scalar"):
        del text[key]
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [5, 6]}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "generation_config.json").unlink()
    scores = Cached(tmp_path).read(PROMPT)
    torch.testing.assert_close(scores, expected[0], atol=1e-3, rtol=0)
    assert read_config(tmp_path).stop_ids == (5, 6)
