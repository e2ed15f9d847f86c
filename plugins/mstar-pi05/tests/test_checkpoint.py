"""Config files, statistics and tokenizers of both published layouts, and deployment options."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mstar_core.errors import ConfigError, WeightsError
from mstar_core.plugin import Action
from mstar_core.plugin.check.spec_check import check_spec
from mstar_core.weights.sources import STAMP
from mstar_pi05.checkpoint.config import Sizes, read_sizes
from mstar_pi05.deployment import MODEL_KWARGS, read_deployment, tower_dtype
from mstar_pi05.plugin import mstar_models
from mstar_pi05.request.prompt import PromptTokenizer
from mstar_pi05.request.sentencepiece import read_sentencepiece
from mstar_pi05.robots.statistics import Moments, find_statistics
from mstar_pi05.sources.tiny import write_tiny

HEAVY = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "PIL", "msgspec")
DATA = Path(__file__).parent / "data"


def write(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(("module", "heavy"), [("plugin", HEAVY), ("processor", ("torch", "transformers"))])
def test_what_runs_outside_the_workers_loads_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import mstar_pi05.{module}; print([name for name in {heavy} if name in sys.modules])"
    path = [entry for entry in sys.path if entry]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {code}"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


# -- sizes ----------------------------------------------------------------------------------------------------------


def test_lerobots_config_names_variants(tmp_path: Path) -> None:
    config = {
        "type": "pi05",
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "tokenizer_max_length": 200,
        "min_period": 0.004,
        "max_period": 4.0,
        "image_resolution": [224, 224],
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
    }
    assert read_sizes(write(tmp_path, "config.json", config)) == Sizes()


def test_openpis_config_gives_the_horizon(tmp_path: Path) -> None:
    config = {
        "action_dim": 32,
        "action_horizon": 15,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "bfloat16",
    }
    assert read_sizes(write(tmp_path, "config.json", config)) == replace(Sizes(), horizon=15)


def test_a_config_may_give_every_size(golden: Any, checkpoint: Path) -> None:
    actual, inputs = read_sizes(checkpoint), golden.config
    assert (actual.vocab, actual.prompt_ids, actual.horizon) == (
        inputs["vocab_size"],
        inputs["max_token_len"],
        inputs["action_horizon"],
    )
    for part in ("vision", "language", "expert"):
        assert {name: getattr(getattr(actual, part), name) for name in inputs[part]} == inputs[part]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"type": "pi0"}, "type"),
        ({"action_dim": 14}, "action_dim"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": "many"}, "chunk_size"),
        ({"image_resolution": [224, 448]}, "image_resolution"),
        ({"image_resolution": "big"}, "image_resolution"),
        ({"paligemma_variant": "gemma_7b"}, "paligemma_variant"),
        ({"expert": {"layers": 3}}, "expert.layers"),
        ({"vision": {"image_size": 225}}, "vision.image_size"),
        ({"vision": 3}, "vision"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"language": {"heads": True}}, "language.heads"),
    ],
)
def test_a_config_that_cannot_be_built_names_its_key(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        read_sizes(write(tmp_path, "config.json", config))
    assert caught.value.facts["key"] == key
    assert "config.json" in caught.value.title


# -- options --------------------------------------------------------------------------------------------------------


def bound(**model_kwargs: Any) -> Any:
    return mstar_models()[0].bound(None, model_kwargs)


def test_the_robots_differ_in_horizon_and_width() -> None:
    for horizon, robot, dim in ((50, "aloha", 14), (15, "droid", 8), (10, "libero", 7)):
        spec = bound(action_horizon=horizon, robot=robot)
        assert spec.output("action") == Action(horizon=horizon, dim=dim)
        assert check_spec(spec) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("action_horizons", 50),
        ("action_horizon", 0),
        ("action_dim", 33),
        ("max_num_steps", 101),
        ("expected_num_steps", [21]),
        ("expected_num_steps", 10),
        ("robot", "arx"),
        ("robot", 3),
        ("resize", "fast"),
        ("vision_dtype", "float16"),
        ("state_in_prompt", "yes"),
        ("pad_state", 1),
        ("adapt_to_pi", "no"),
        ("default_prompt", 4),
        ("norm_stats", 7),
        ("delta_actions", True),
    ],
)
def test_a_wrong_option_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        bound(**{key: value})
    assert caught.value.facts["key"] == f"model_kwargs.{key}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("chosen", "is_half", "expected"),
    [(None, True, "tf32"), (None, False, "float32"), ("float32", True, "float32"), ("bfloat16", False, "bfloat16")],
)
def test_the_tower_is_no_more_exact_than_what_reads_it_unless_asked(
    chosen: str | None, is_half: bool, expected: str
) -> None:
    deployment = read_deployment({} if chosen is None else {"vision_dtype": chosen})
    assert tower_dtype(deployment.vision_dtype, is_half) == expected


def test_options_that_a_robot_brings_can_be_turned_off() -> None:
    aloha = read_deployment({"robot": "aloha"})
    assert aloha.mirrors and sum(aloha.is_delta) == 12 and not aloha.is_delta[6] and not aloha.is_delta[13]
    plain = read_deployment({"robot": "aloha", "adapt_to_pi": False, "delta_actions": False})
    assert not plain.mirrors and plain.is_delta == ()
    assert read_deployment(MODEL_KWARGS) == read_deployment({})


# -- statistics -----------------------------------------------------------------------------------------------------

SET = {"norm_stats": {name: {"q01": [-1.0, 0.0], "q99": [1.0, 2.0]} for name in ("state", "actions")}}


def test_one_set_is_taken_and_several_must_be_chosen(tmp_path: Path) -> None:
    assert find_statistics(tmp_path, None) is None
    write(tmp_path, "assets/lab/droid/norm_stats.json", SET)
    statistics = find_statistics(tmp_path, None)
    assert statistics is not None and statistics.state == Moments(span="range", low=(-1.0, 0.0), high=(1.0, 2.0))
    write(tmp_path, "assets/trossen/norm_stats.json", SET)
    with pytest.raises(ConfigError, match="2 robots") as caught:
        find_statistics(tmp_path, None)
    assert "lab/droid" in caught.value.hint and "trossen" in caught.value.hint
    assert find_statistics(tmp_path, "none") is None
    chosen = find_statistics(tmp_path, "lab/droid")
    assert chosen is not None and chosen.source.parent.name == "droid"


def test_a_set_may_be_a_path(tmp_path: Path) -> None:
    write(tmp_path, "mine/norm_stats.json", SET)
    for inputs in ("mine", "mine/norm_stats.json", str(tmp_path / "mine")):
        assert find_statistics(tmp_path, inputs) == find_statistics(tmp_path, "mine")


def test_unknown_statistics_are_refused_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "assets/trossen/norm_stats.json", SET)
    write(tmp_path, "config.json", {})
    with pytest.raises(ConfigError, match="did you mean 'trossen'"):
        find_statistics(tmp_path, "trosen")
    with pytest.raises(ConfigError, match="trosen"):  # before anything is started
        mstar_models()[0].bound(tmp_path, {"norm_stats": "trosen"})


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        {},
        {"norm_stats": {"state": {}}},
        {"norm_stats": {"state": {"q01": [0.0], "q99": [1.0, 2.0]}}},
        {"norm_stats": {"actions": {"q01": ["a"], "q99": ["b"]}}},
        {"norm_stats": {"state": {"q01": [], "q99": []}}},
    ],
)
def test_damaged_statistics_are_named(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "norm_stats.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(WeightsError, match="norm_stats.json"):
        find_statistics(tmp_path, None)


def lerobot(folder: Path, mode: str, stats: dict[str, list[float]], eps: float = 1e-8) -> Path:
    for file, step, kind in (
        ("policy_preprocessor", "normalizer_processor", "STATE"),
        ("policy_postprocessor", "unnormalizer_processor", "ACTION"),
    ):
        state = f"{file}_step_1_{step}.safetensors"
        config = {"eps": eps, "norm_map": {"VISUAL": "IDENTITY", kind: mode}, "features": {}}
        write(
            folder,
            f"{file}.json",
            {
                "name": file,
                "steps": [
                    {"registry_name": "to_batch_processor", "config": {}},
                    {"registry_name": step, "config": config, "state_file": state},
                ],
            },
        )
        save_file({name: torch.tensor(values) for name, values in stats.items()}, folder / state)
    return folder


@pytest.mark.parametrize(
    ("mode", "names", "span"),
    [
        ("QUANTILES", ("q01", "q99"), "range"),
        ("MIN_MAX", ("min", "max"), "range"),
        ("MEAN_STD", ("mean", "std"), "spread"),
    ],
)
def test_lerobots_processor_files_are_read(mode: str, names: tuple[str, str], span: Any, tmp_path: Path) -> None:
    low, high = names
    stats = {
        f"observation.state.{low}": [0.0, 0.5, -1.0],
        f"observation.state.{high}": [2.0, 0.5, 1.0],
        f"action.{low}": [-1.0],
        f"action.{high}": [3.0],
        "observation.image.count": [7.0],
    }
    statistics = find_statistics(lerobot(tmp_path, mode, stats), None)
    assert statistics is not None
    adds = span == "spread"
    assert statistics.state == Moments(span=span, low=(0.0, 0.5, -1.0), high=(2.0, 0.5, 1.0), epsilon=1e-8, adds=adds)
    assert statistics.actions == Moments(span=span, low=(-1.0,), high=(3.0,), epsilon=1e-8, adds=adds)


@pytest.mark.parametrize("mode", ["IDENTITY", "QUANTILES"])
def test_lerobots_base_files_bring_no_statistics(mode: str, tmp_path: Path) -> None:
    assert find_statistics(lerobot(tmp_path, mode, {"observation.image.mean": [1.0]}), None) is None


def test_lerobots_damaged_files_are_named(tmp_path: Path) -> None:
    stats = {"observation.state.q01": [0.0], "observation.state.q99": [1.0, 2.0]}
    with pytest.raises(WeightsError, match="policy_preprocessor"):
        find_statistics(lerobot(tmp_path, "QUANTILES", stats), None)
    next(tmp_path.glob("policy_preprocessor*.safetensors")).write_bytes(b"cut")
    with pytest.raises(WeightsError, match="no usable statistics"):
        find_statistics(tmp_path, None)
    with pytest.raises(WeightsError, match="QUANTILE10"):
        find_statistics(lerobot(tmp_path, "QUANTILE10", {}), None)


# -- tokenizers -----------------------------------------------------------------------------------------------------


def test_a_sentencepiece_file_gives_the_ids_of_its_own_library() -> None:
    """Compare with ids from sentencepiece 0.2.3: spaces, lines, digits, bytes, user-defined tokens."""
    tokenizer = read_sentencepiece(DATA / "sentencepiece.model")
    tokenizer.encode_special_tokens = True
    cases = json.loads((DATA / "sentencepiece_ids.json").read_text())
    assert len(cases) > 50
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def test_either_file_serves_a_prompt(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "paligemma_tokenizer.model").write_bytes((DATA / "sentencepiece.model").read_bytes())
    for folder in (tmp_path, tiny_folder):
        tokenizer = PromptTokenizer(folder)
        ids = tokenizer.encode([("Task: go, State: 1;\nAction: ", True)])
        assert ids[0] == 2 and ids[-1] not in (1, 2)
        assert len(tokenizer.encode([("go", True), ("\n", False)])) == len(tokenizer.encode([("go", True)])) + 1


@pytest.mark.parametrize(("name", "data"), [("tokenizer.json", b"{}"), ("tokenizer.model", b"\x0a\xff\xff\xff\x0f")])
def test_a_damaged_tokenizer_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(WeightsError, match=name):
        PromptTokenizer(tmp_path)


# -- the tiny checkpoint --------------------------------------------------------------------------------------------


def test_the_tiny_checkpoint_is_small_and_the_same_every_time(tmp_path: Path, tiny_folder: Path) -> None:
    again = write_tiny(tmp_path / "again")
    files = sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert sum((again / path).stat().st_size for path in files) < 3 << 20
    for path in files:
        assert (again / path).read_bytes() == (tiny_folder / path).read_bytes(), path


def test_an_older_tiny_checkpoint_is_replaced_and_a_current_one_kept(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "mark").touch()
    assert (write_tiny(folder) / "mark").exists()
    (folder / STAMP).write_text('{"version": 0}')
    assert not (write_tiny(folder) / "mark").exists()
