"""Specs follow the sizes and ids of a checkpoint's own files, and a damaged file is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import WeightsError
from mstar_core.graph import StopOn, loops
from mstar_core.plugin import Action, ModelSpec
from mstar_core.plugin.check.spec_check import check_spec
from tests.families.families import SPECS

ATTENTION = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
OMNI = json.loads(
    (Path(__file__).parents[2] / "plugins" / "mstar-qwen3omni" / "tests" / "golden" / "config.json").read_text()
)
FILES: dict[str, dict[str, Any]] = {
    "bagel": {
        "llm_config.json": {**ATTENTION, "hidden_size": 64},
        "tokenizer_config.json": {"added_tokens_decoder": {"282": {"content": "<|im_end|>"}}},
    },
    "qwen3_omni": {"config.json": OMNI},
    "pi05": {
        "config.json": {
            "chunk_size": 12,
            "language": {"layers": 4, "kv_heads": 1, "head_dim": 32},
            "vision": {"image_size": 56},
        }
    },
    "vjepa2_ac": {
        "config.json": {
            "encoder": {"crop_size": 32, "patch_size": 8},
            "ac_predictor": {"depth": 3, "num_heads": 3, "predictor_embed_dim": 48, "use_extrinsics": True},
        }
    },
}


def bound(model: str, folder: Path, **model_kwargs: Any) -> ModelSpec:
    for name, content in FILES[model].items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    spec = SPECS[model].bound(folder, {**SPECS[model].model_kwargs, **model_kwargs})
    assert check_spec(spec) == []
    return spec


def shape(spec: ModelSpec, node: str) -> tuple[int, int, int]:
    kv = spec.node(node).kv
    assert kv is not None
    return kv.layers, kv.kv_heads, kv.head_dim


def stop_ids(spec: ModelSpec, walk: str) -> tuple[int, ...]:
    (loop,) = loops(spec.walk(walk)[1])
    assert isinstance(loop.stop, StopOn)
    return loop.stop.ids


def test_bagel(tmp_path: Path) -> None:
    spec = bound("bagel", tmp_path)
    assert {shape(spec, node) for node in ("LLM", "LLM_cfg_text", "LLM_cfg_img")} == {(3, 2, 16)}
    assert stop_ids(spec, "decode") == (282,)


def test_qwen3_omni(tmp_path: Path) -> None:
    spec = bound("qwen3_omni", tmp_path)
    thinker, talker = OMNI["thinker_config"]["text_config"], OMNI["talker_config"]
    sizes = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    assert shape(spec, "Thinker") == tuple(thinker[name] for name in sizes)
    assert shape(spec, "Talker") == tuple(talker["text_config"][name] for name in sizes)
    stop, vocab = talker["codec_eos_token_id"], talker["text_config"]["vocab_size"]
    assert (stop_ids(spec, "thinker_decode"), stop_ids(spec, "talker_decode")) == ((OMNI["im_end_token_id"],), (stop,))
    sampling = spec.node("Talker").sampling
    assert sampling is not None
    assert {code for span in sampling.suppress for code in span} == set(range(vocab - 1024, vocab)) - {stop}
    assert spec.node("Talker").ports["frame"] == f"i64[{talker['num_code_groups']}]"


def test_pi05(tmp_path: Path) -> None:
    spec = bound("pi05", tmp_path)
    assert shape(spec, "LLM") == (4, 1, 32)
    assert spec.output("action") == Action(horizon=12, dim=32)
    assert bound("pi05", tmp_path, action_horizon=5).output("action") == Action(horizon=5, dim=32)


def test_vjepa2_ac(tmp_path: Path) -> None:
    spec = bound("vjepa2_ac", tmp_path)
    assert shape(spec, "ac_predictor") == (3, 3, 16)
    kv = spec.node("ac_predictor").kv
    assert kv is not None
    assert kv.page == 16 + 3
    assert spec.max_seq_len == 32 * 19


def test_the_official_action_checkpoint_has_no_config(tmp_path: Path) -> None:
    assert shape(SPECS["vjepa2_ac"].bound(tmp_path, {}), "ac_predictor") == (24, 16, 64)


@pytest.mark.parametrize("model", FILES)
@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_damaged_file_is_named(model: str, text: str, tmp_path: Path) -> None:
    name = next(iter(FILES[model]))
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(WeightsError, match=name):
        SPECS[model].bound(tmp_path, {})


@pytest.mark.parametrize("model", [name for name in FILES if name != "pi05"])
def test_a_missing_key_is_named(model: str, tmp_path: Path) -> None:
    name = next(iter(FILES[model]))
    (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(WeightsError, match="lacks"):
        SPECS[model].bound(tmp_path, {})
