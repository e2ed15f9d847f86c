"""Memory budgets: the plan shows what a deployment takes of each device, and refuses what can never fit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.sizes import parse_budget, parse_size
from mstar_core.errors import ExitCode
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, MemoryClaim, acquire_gpus, release
from tests.cli.life.conftest import own_port
from tests.cli.life.test_gpus import GIB, checkpoint, two_gpus

Cli = Callable[..., Any]
__all__ = ["two_gpus"]


@pytest.fixture
def two_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: Cli) -> None:
    """CPU ranks whose memory is counted as on two devices of 2 GiB."""
    monkeypatch.setenv("MSTAR_FAKE_MEMORY", "cpu:0=2GiB,cpu:1=2GiB")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))


def planned(tool: Cli, *words: str) -> dict[str, Any]:
    said = tool("plan", *words, "-o", "json")
    assert said.code == 0, said.err
    item: dict[str, Any] = json.loads(said.out)["items"][0]
    return item


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("20GiB", 20 << 30), ("1.5 GB", 1_500_000_000), ("3KiB", 3072), ("2B", 2)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size and parse_budget(text).of(1 << 40) == size


@pytest.mark.parametrize("text", ["", "GiB", "20 gigs", "0", "0%", "101%", "-1", "1e9", "5iB"])
def test_other_texts_are_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_budget(text)
    assert parse_budget("25%").of(80) == 20 and parse_budget("auto").of(80) is None


def test_the_plan_shows_who_holds_what_what_it_takes_and_what_is_left(tool: Cli, two_gpus: Path) -> None:
    total = 81000 << 20
    claim = MemoryClaim(device="cuda:1", need_bytes=30 * GIB, total_bytes=total)
    held = acquire_gpus({"cuda:1": "GPU-bbbb"}, "bagel", {"GPU-bbbb": claim})
    item = planned(tool, "orpheus:tiny", "--gpus", "1", "--memory", "20GiB")
    assert item["fits"] and item["memory"] == [
        {
            "device": "cuda:1",
            "key": "GPU-bbbb",
            "total_bytes": total,
            "held": [{"deployment": "bagel", "pid": os.getpid(), "bytes": 30 * GIB}],
            "takes_bytes": 20 * GIB,
            "left_bytes": total - 50 * GIB,
        }
    ]
    said = tool("plan", "orpheus:tiny", "--gpus", "1", "--memory", "50GiB")
    assert said.code == 0 and "takes 50.0 GiB of 79.1 GiB, bagel holds 30.0 GiB" in said.out
    assert f"{80 * GIB - total:,} bytes too few now" in said.out
    whole = planned(tool, "orpheus:tiny", "--gpus", "1")
    assert not whole["fits"] and whole["memory"][0]["takes_bytes"] == total
    release(held)


def test_the_plan_says_whether_the_deployment_can_sleep(tool: Cli, two_gpus: Path) -> None:
    words = ("orpheus:tiny", "--gpus", "1", "--memory", "20GiB")
    assert planned(tool, *words)["can_sleep"] is False
    assert "cannot; --set sleepable=true" in tool("plan", *words).out
    assert planned(tool, *words, "--set", "sleepable=true")["can_sleep"] is True
    assert planned(tool, "orpheus:tiny", "--device", "cpu")["can_sleep"] is True


def test_a_gateway_warns_of_a_rule_that_needs_a_sleep_on_gpus(tool: Cli, two_gpus: Path) -> None:
    file = two_gpus / "serve.yaml"
    file.write_text("models:\n  voice: {target: orpheus, keep: idle 10m}\n")
    assert "keep is idle" not in tool("serve", str(file), "--dry-run").err
    file.write_text(f"sleepable: false\n{file.read_text()}")
    said = tool("serve", str(file), "--dry-run")
    assert said.code == 0 and "voice: keep is idle 10m" in said.err and "sleepable: true" in said.err


def test_up_is_refused_where_the_budget_is_not_free_now(tool: Cli, two_gpus: Path) -> None:
    claim = MemoryClaim(device="cuda:1", need_bytes=70 * GIB, total_bytes=81000 << 20)
    held = acquire_gpus({"cuda:1": "GPU-bbbb"}, "bagel", {"GPU-bbbb": claim})
    words = ("up", "orpheus:tiny", "--gpus", "1", "--dry-run", *own_port())
    said = tool(*words, "--memory", "20GiB")
    assert said.code == ExitCode.START_FAILED and "GPU 1 has too little memory left for orpheus" in said.err
    assert "'bagel'" in said.err and "holds 70.0 GiB" in said.err
    assert tool(*words, "--memory", "5GiB").code == 0
    assert "GPU 1 is in use" in tool(*words).err, "without a budget it takes the whole GPU"
    release(held)


def test_weights_above_the_budget_are_refused_before_anything_starts(tool: Cli, two_gpus: Path) -> None:
    folder = checkpoint(two_gpus / "weights", 30)
    words = ("plan", "orpheus", "--weights", str(folder), "--gpus", "1", "--memory")
    said = tool(*words, "20GiB")
    assert said.code == ExitCode.START_FAILED and "orpheus can never fit its memory budget" in said.err
    assert "need 30.0 GiB and its budget is 20.0 GiB" in said.err and f"{10 * GIB:,} bytes too few" in said.err
    assert "--memory" in said.err
    assert tool(*words, "40GiB").code == 0


def test_an_automatic_budget_covers_weights_caches_and_reserve(tool: Cli, two_gpus: Path) -> None:
    folder = checkpoint(two_gpus / "weights", 6)
    words = ("orpheus", "--weights", str(folder), "--gpus", "1", "--memory", "auto")
    few = planned(tool, *words, "--set", "max_concurrent_requests=4")["memory"][0]["takes_bytes"]
    many = planned(tool, *words, "--set", "max_concurrent_requests=8")["memory"][0]["takes_bytes"]
    assert 8 * GIB < few < many < 60 * GIB
    said = tool("plan", "orpheus:tiny", "--gpus", "1", "--memory", "auto")
    assert said.code == ExitCode.INVALID and "no known size" in said.err


def test_a_budget_that_cannot_be_read_names_the_forms(tool: Cli, two_fakes: None) -> None:
    said = tool("plan", "orpheus:tiny", "--device", "cpu", "--memory", "much")
    assert said.code == ExitCode.INVALID and "20GiB" in said.err and "25%" in said.err


def test_a_limit_needs_a_budget(tool: Cli, two_fakes: None) -> None:
    said = tool("plan", "orpheus:tiny", "--device", "cpu", "--set", "memory_limit=true")
    assert said.code == ExitCode.INVALID and "memory_limit has no memory_budget to hold" in said.err
    planned(tool, "orpheus:tiny", "--device", "cpu", "--memory", "2GiB", "--set", "memory_limit=true")


def test_cpu_ranks_take_faked_devices_in_turn_and_divide_their_budget(tool: Cli, two_fakes: None) -> None:
    item = planned(tool, "orpheus:tiny", "--device", "cpu", "--memory", "25%")
    assert [(each["device"], each["takes_bytes"]) for each in item["memory"]] == [("cpu:0", GIB // 2)]
    item = planned(tool, "orpheus_disaggregated:tiny", "--device", "cpu", "--memory", "1GiB")
    assert [(each["device"], each["takes_bytes"]) for each in item["memory"]] == [("cpu:0", GIB), ("cpu:1", GIB)]


def test_a_budget_above_the_device_can_never_fit(tool: Cli, two_fakes: None) -> None:
    said = tool("plan", "orpheus:tiny", "--device", "cpu", "--memory", "3GiB")
    assert said.code == ExitCode.START_FAILED and "orpheus can never fit on cpu:0" in said.err
    assert "3.0 GiB of 2.0 GiB" in said.err and f"{GIB:,} bytes too few" in said.err
