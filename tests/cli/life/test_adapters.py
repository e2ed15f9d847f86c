"""LoRA adapters of a start: the room that the planner decides, and what it refuses before a process exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.resolved import LoraConfig, ResolvedConfig
from mstar_core.errors import ConfigError, UsageError
from mstar_core.plugin import ModelSpec
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.adapters import named_folders, plan_adapters
from tests.fakes.adapters import write_folder


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return Plugins.discover().model("orpheus")


def adapter(folder: Path, rank: int = 8, **changes: Any) -> str:
    write_folder(folder, {}, {"r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}, changes)
    return str(folder)


def config(**lora: Any) -> ResolvedConfig:
    return ResolvedConfig(model="orpheus", name="speaker", lora=LoraConfig(**lora))


def test_without_adapters_no_room_is_reserved(model: ModelSpec) -> None:
    assert plan_adapters(model, config()) == (LoraConfig(), ())


def test_the_room_follows_the_adapters_of_the_start(model: ModelSpec, tmp_path: Path) -> None:
    folders = {"a": adapter(tmp_path / "a", 8), "b": adapter(tmp_path / "b", 40)}
    lora, plans = plan_adapters(model, config(adapters=folders))
    assert (lora.max_adapters, lora.max_rank) == (8, 40)
    assert [(plan.number, plan.row, plan.name, plan.rank) for plan in plans] == [(1, 0, "a", 8), (2, 1, "b", 40)]
    assert plan_adapters(model, config(max_adapters=3))[0] == LoraConfig(max_adapters=3, max_rank=16)


def test_adapters_beyond_the_room_are_refused_at_their_key(model: ModelSpec, tmp_path: Path) -> None:
    folders = {"a": adapter(tmp_path / "a", 40), "b": adapter(tmp_path / "b")}
    with pytest.raises(ConfigError, match="2 adapters do not fit into the room for 1"):
        plan_adapters(model, config(adapters=folders, max_adapters=1))
    with pytest.raises(ConfigError, match=r"has rank 40, and lora.max_rank is 16"):
        plan_adapters(model, config(adapters=folders, max_rank=16))


def test_adapters_that_cannot_be_served_are_refused_before_the_start(model: ModelSpec, tmp_path: Path) -> None:
    dora = adapter(tmp_path / "dora", use_dora=True)
    with pytest.raises(ConfigError, match="adapter 'dora': an adapter with use_dora: DoRA is not supported"):
        plan_adapters(model, config(adapters={"dora": dora}))
    with pytest.raises(ConfigError, match="cannot have the model's name"):
        plan_adapters(model, config(adapters={"speaker": adapter(tmp_path / "a")}))
    without = unadapted(model)
    with pytest.raises(ConfigError, match="orpheus takes no LoRA adapters"):
        plan_adapters(without, config(max_adapters=1))


def unadapted(model: ModelSpec) -> ModelSpec:
    """The model without a node that takes adapters."""
    return replace(model, nodes=tuple(replace(node, adapter_prefix=None) for node in model.nodes))


def test_folders_on_the_command_line_have_distinct_names(tmp_path: Path) -> None:
    assert named_folders([f"a={tmp_path}"], "--lora") == {"a": str(tmp_path)}
    assert named_folders([], "--lora") is None
    for bad in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(UsageError):
            named_folders(bad, "--lora")
