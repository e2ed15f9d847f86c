"""Busy-poll window: as configured, otherwise only beside accelerators and with enough cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.deployment import DeploymentSpec, Plan, RankPlan
from mstar_core.errors import ConfigError
from mstar_core.host.wait_spin import AUTOMATIC_US, usable_cores, wait_spin_s
from tests.config.conftest import Resolve

TEXT = "model: toy\nnode_groups:\n  - node_names: [LLM, vocoder]\n    ranks: [0]\n"
AUTOMATIC_S = AUTOMATIC_US / 1e6


def deployed(*devices: str, wait_spin_us: int | None = None) -> DeploymentSpec:
    ranks = tuple(RankPlan(rank=rank, device=device, nodes=("LLM",)) for rank, device in enumerate(devices))
    return DeploymentSpec(
        name="toy",
        model="toy",
        plugin="toy",
        run_dir="/run",
        log_dir="/log",
        plan=Plan(ranks=ranks, placements=()),
        wait_spin_us=wait_spin_us,
    )


@pytest.mark.parametrize(
    ("devices", "cores", "expected"),
    [
        (("cuda:0",), 16, AUTOMATIC_S),
        (("cuda:0",), 12, AUTOMATIC_S),
        (("cuda:0",), 11.5, 0.0),
        (("cuda:0", "cuda:1"), 15, 0.0),
        (("cuda:0", "cuda:1"), 16, AUTOMATIC_S),
        (("cpu",), 128, 0.0),
    ],
)
def test_untold_it_takes_an_accelerator_and_four_cores_per_process(
    devices: tuple[str, ...], cores: float, expected: float
) -> None:
    assert wait_spin_s(deployed(*devices), cores) == expected


def test_what_the_file_says_holds_on_any_machine() -> None:
    assert wait_spin_s(deployed("cpu", wait_spin_us=250), 1) == 250e-6
    assert wait_spin_s(deployed("cuda:0", wait_spin_us=0), 128) == 0.0


def test_the_file_says_it_or_leaves_it_to_the_machine(resolved: Resolve) -> None:
    assert resolved(TEXT).wait_spin_us is None
    assert resolved(TEXT + "wait_spin_us: null\n").wait_spin_us is None
    assert resolved(TEXT + "wait_spin_us: 200\n").wait_spin_us == 200
    assert resolved(TEXT + "wait_spin_us: 200\n", "wait_spin_us=0").wait_spin_us == 0


@pytest.mark.parametrize("value", ["-1", "2.5", "10000001", "on", "true"])
def test_other_values_are_refused_with_line_and_range(resolved: Resolve, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(TEXT + f"wait_spin_us: {value}\n")
    assert "toy.yaml:5" in str(refused.value.facts) or refused.value.facts["line"] == 5
    assert "wait_spin_us" in f"{refused.value.title} {refused.value.facts}"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("200000 100000", 2.0), ("50000 100000", 0.5), ("max 100000", None), ("", None), ("a b", None)],
)
def test_a_containers_share_of_the_cores_counts(tmp_path: Path, limit: str, expected: float | None) -> None:
    whole = usable_cores(tmp_path / "missing")
    assert whole >= 1
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path / "cpu.max") == (whole if expected is None else min(whole, expected))
