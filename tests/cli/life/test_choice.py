"""The shipped file that `--gpus auto:N` chooses, and why, with lists of GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mstar_core.config.files.load import shipped
from mstar_core.errors import ConfigError, ExitCode
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.choice import GB, Choice, choose
from mstarctl.start.target import find, resolve_target

Cli = Callable[..., Any]


def chosen(model: str, *gigabytes: int, variant: str = "") -> Choice:
    return choose(Plugins.discover().model(model), [gigabyte * GB for gigabyte in gigabytes], variant=variant)


@pytest.mark.parametrize(
    ("model", "gigabytes", "name"),
    [
        ("qwen3_omni", (141,), "qwen3omni_single_gpu"),
        ("qwen3_omni", (80, 80), "qwen3omni_2gpu"),
        ("qwen3_omni", (80, 24), "qwen3omni_2gpu"),
        ("qwen3_omni", (48, 48), "qwen3omni_colocated"),
        ("qwen3_omni", (80, 80, 80), "qwen3omni_replicas"),
        ("qwen3_omni", (80, 24, 12), "qwen3omni_3gpu"),
        ("qwen3_omni", (48, 48, 24, 24), "qwen3omni_tp2_full"),
        ("orpheus", (24,), "orpheus_colocated"),
        ("orpheus", (24, 24), "orpheus_replicas"),
        ("orpheus", (16, 4), "orpheus_disaggregated"),
        ("orpheus", (8, 8), "orpheus_tp2"),
        ("bagel", (48, 24), "bagel_disaggregated"),
        ("bagel", (48, 4), "bagel_single_gpu"),
        ("bagel", (48, 40), "bagel_cfg_parallel_2gpu"),
        ("bagel", (24, 24), "bagel_tp2"),
        ("pi05", (24,), "pi05"),
        ("vjepa2_ac", (80, 80), "vjepa2_ac_replicas"),
        ("orpheus", (0, 0), "orpheus_replicas"),
    ],
)
def test_the_best_file_that_fits_is_chosen(model: str, gigabytes: tuple[int, ...], name: str) -> None:
    assert chosen(model, *gigabytes).best.name == name


def test_a_miniature_fits_every_gpu() -> None:
    assert chosen("bagel", 4, 4, variant="tiny").best.name == "bagel_replicas"


def test_a_file_needs_the_memory_that_it_states() -> None:
    choice = chosen("qwen3_omni", 79, 80)
    assert choice.best.name == "qwen3omni_colocated"
    (other,) = (candidate for candidate in choice.candidates if candidate.name == "qwen3omni_2gpu")
    assert choice.why(other) == "rank 0 needs a GPU of 80 GB, and its GPU has 79"


@pytest.mark.parametrize(("model", "gigabytes"), [("qwen3_omni", (48,)), ("bagel", (16, 16)), ("orpheus", (8,))])
def test_without_a_file_that_fits_each_has_its_reason(model: str, gigabytes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="no deployment file") as error:
        chosen(model, *gigabytes)
    known = [name for name in shipped(Plugins.discover().model(model)) if name.startswith(model[:5].replace("3_", "3"))]
    assert all(f"{name}: " in error.value.detail for name in known)
    assert "needs" in error.value.detail and "--config" in error.value.hint


def test_every_shipped_group_states_its_memory() -> None:
    plugins = Plugins.discover()
    for model in plugins.models():
        for name, path in shipped(model).items():
            for group in resolve_target(find(str(path), plugins)).node_groups:
                assert group.device_gb, f"{name}: {group.key}"


def test_explain_shows_every_file_with_its_reason(tool: Cli) -> None:
    said = tool("config", "explain", "orpheus", "--gpus", "auto:2", "--gpu-gb", "80", "-o", "json")
    assert said.code == 0, said.err
    actual = {item["name"]: (item["result"], item["why"]) for item in said.items}
    assert said.items[0]["name"] == "orpheus_replicas"
    assert actual["orpheus_replicas"] == ("chosen", "uses 2 of 2 GPUs; copies of nodes")
    assert actual["orpheus_colocated"] == ("fits", "uses 1 of 2 GPUs")
    assert actual["orpheus_tp2"] == ("fits", "tensor parallelism is for models that do not fit otherwise")
    assert len(actual) == 5


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("orpheus", "--gpus", "auto:2"), ExitCode.INVALID, "0 GPUs visible"),
        (("orpheus", "--gpus", "0,1"), ExitCode.USAGE, "auto:2"),
        (("--gpus", "auto:2"), ExitCode.USAGE, "config explain MODEL"),
        (("orpheus", "--gpu-gb", "80"), ExitCode.USAGE, "no effect"),
        (("qwen3_omni", "--gpus", "auto:1", "--gpu-gb", "48"), ExitCode.INVALID, "fits 1 GPU of 48 GB"),
        (("orpheuss", "--gpus", "auto:1"), ExitCode.NOT_FOUND, "did you mean 'orpheus'?"),
    ],
)
def test_explain_refuses_what_has_no_answer(tool: Cli, words: tuple[str, ...], code: ExitCode, text: str) -> None:
    said = tool("config", "explain", *words)
    assert (said.code, text in said.err) == (code, True), said.err
