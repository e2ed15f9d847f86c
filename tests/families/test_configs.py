"""Every deployment file parses, fits its model, equals the copy in its plugin and states its purpose."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from mstar_core.config.files.load import read_file
from mstar_core.config.files.placement import make_plan
from mstar_core.config.files.resolution import resolve
from mstarctl.start.plan import check_placement
from tests.families.families import ROOT, SPECS

FILES = sorted((ROOT / "configs").glob("*.yaml"))
SHIPPED = sorted(ROOT.glob("plugins/*/src/*/configs/*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_fits_its_model(path: Path) -> None:
    spec = SPECS[yaml.safe_load(path.read_text(encoding="utf-8"))["model"]]
    config = resolve(spec, read_file(path))
    plan = make_plan(spec, config, ("cpu",))
    assert all(rank.held for rank in plan.ranks)
    spec.bound(None, config.model_kwargs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_what_it_is_for_and_what_it_needs(path: Path) -> None:
    purpose, memory = path.read_text(encoding="utf-8").splitlines()[:2]
    assert purpose.startswith("# ")
    assert memory.startswith("# Memory: ")
    assert "GB" in memory or "GiB" in memory


@pytest.mark.parametrize("path", [path for path in FILES if "tp_size" in path.read_text()], ids=lambda path: path.stem)
def test_a_tensor_parallel_file_can_run(path: Path) -> None:
    spec = SPECS[yaml.safe_load(path.read_text(encoding="utf-8"))["model"]]
    config = resolve(spec, read_file(path))
    plan = make_plan(spec, config, ("cpu",))
    check_placement(spec, config, plan)
    for group in plan.groups:
        leader, *followers = (next(rank for rank in plan.ranks if rank.rank == number) for number in group.ranks)
        assert set(group.nodes) <= set(leader.nodes)
        assert all(set(rank.follows) == set(group.nodes) for rank in followers)


def test_the_files_are_those_that_the_plugins_ship() -> None:
    """Files of a miniature are in the plugins alone."""
    shipped = [path for path in SHIPPED if ":" not in yaml.safe_load(path.read_text(encoding="utf-8"))["model"]]
    assert {path.name: path.read_bytes() for path in shipped} == {path.name: path.read_bytes() for path in FILES}
    assert len(shipped) == len(FILES)


def test_a_file_of_a_miniature_is_its_own() -> None:
    for path in set(SHIPPED) - {path for path in SHIPPED if (ROOT / "configs" / path.name).exists()}:
        name, _, variant = yaml.safe_load(path.read_text(encoding="utf-8"))["model"].partition(":")
        assert variant == "mini" and SPECS[name].mini_config == path.stem


@pytest.mark.parametrize("model", SPECS)
def test_every_model_ships_its_default(model: str) -> None:
    spec = SPECS[model]
    package, _, folder = spec.configs.partition(":")
    home = Path(str(importlib.import_module(package).__file__)).parent
    found = yaml.safe_load((home / folder / f"{spec.default_config}.yaml").read_text(encoding="utf-8"))
    assert found["model"] == model


def test_the_defaults_are_those_that_operators_know() -> None:
    assert {name: spec.default_config for name, spec in SPECS.items()} == {
        "bagel": "bagel_single_gpu",
        "llm": "llm_single_gpu",
        "orpheus": "orpheus_colocated",
        "pi05": "pi05",
        "qwen3_omni": "qwen3omni_2gpu",
        "qwen3_tts": "qwen3tts_colocated",
        "qwen3_tts_base": "qwen3tts_base_colocated",
        "vjepa2": "vjepa2",
        "vjepa2_ac": "vjepa2_ac",
        "wan22": "wan22",
        "wan22_a14b": "wan22_a14b",
        "wan22_i2v_a14b": "wan22_i2v_a14b",
        "whisper": "whisper_single_gpu",
    }
