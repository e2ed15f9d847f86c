"""The fleet on real supervisors with fake children: five models on two devices, and kills of the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.local_host import LocalHost, command_error, start_words
from mstar_core.gateway.fleet.plans import KeptPlans
from mstar_core.gateway.parts import ModelState
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, gpu_holders
from mstar_core.host.run_dir import deployments
from mstarctl.output import Printer
from mstarctl.start.served_models import check_starts
from tests.fakes.deployment import runtime
from tests.fakes.fleet_program import UP, fake_fleet
from tests.fakes.fleet_up import TOTAL

__all__ = ["runtime"]

MODELS = ["a-900-0", "b-900-0", "c-900-1", "d-900-01", "e-1500-1"]
KEYS = ("cpu-0", "cpu-1")


@pytest.fixture
def ledger(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger and run directories of this test. Deployments that are left are killed."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(runtime / "locks"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    yield runtime
    for run in deployments():
        if (pid := run.holder()) is not None:
            os.kill(pid, signal.SIGKILL)


def held() -> dict[str, dict[str, int]]:
    """Bytes by device and deployment."""
    return {key: {holder.name: holder.held_bytes or 0 for holder in gpu_holders(key)} for key in KEYS}


def check_ledger() -> None:
    """No device holds more than it has, and only deployments that run hold memory.

    Those that a killed gateway has begun to start may appear meanwhile, so the running ones are read on both sides.
    """
    before, found = running(), held()
    either = before | running()
    for holders in found.values():
        assert sum(holders.values()) <= TOTAL and set(holders) <= either, holders


def running() -> set[str]:
    """Names of the deployments that run."""
    return {run.name for run in deployments() if run.holder() is not None}


async def test_five_models_take_turns_on_two_devices(ledger: Path) -> None:
    fleet = fake_fleet(ledger / "state", MODELS)
    await fleet.start()
    try:
        for name in [*MODELS, *MODELS[:3]]:
            (replica,) = await fleet.ready(name, lambda progress: None)
            with fleet.using(replica):
                states = {status.name: status for status in fleet.models()}
                assert states[name].state is ModelState.READY and all(states[name].held.values())
            check_ledger()
        assert sum(status.wakes for status in fleet.models()) >= 1, "the second turn wakes what sleeps"
    finally:
        await fleet.close(is_final=True)
    assert held() == {key: {} for key in KEYS}


def killed_after(lines: int, state: Path) -> None:
    """Kill a gateway with SIGKILL after so many of its reports."""
    command = [sys.executable, "-m", "tests.fakes.fleet_program", str(state), *MODELS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        for _ in range(lines):
            gateway.stdout.readline()
        gateway.kill()


async def test_killed_gateways_leave_nothing_held_wrongly(ledger: Path) -> None:
    """The first is killed while it loads a model, the next beside one that serves, the last while one has to sleep."""
    for lines in (1, 3, 5):
        await asyncio.to_thread(killed_after, lines, ledger / "state")
        check_ledger()
    fleet = fake_fleet(ledger / "state", MODELS)
    await fleet.start()
    try:
        (replica,) = await fleet.ready(MODELS[-1], lambda progress: None)
        assert replica.deployment == MODELS[-1]
        check_ledger()
    finally:
        await fleet.close(is_final=True)
    assert held() == {key: {} for key in KEYS}
    assert [run.name for run in deployments() if run.holder() is not None] == [], "the last one ends what all started"


def test_the_words_of_an_entry_are_those_of_up() -> None:
    entry = ModelEntry(
        name="m", target="bagel", weights="/w", device="cuda", gpus="0", set={"max_queue": 3, "dtype": "float16"}
    )
    assert start_words(entry) == [
        *("bagel", "--weights", "/w", "--device", "cuda", "--gpus", "0"),
        *("--fit", "--set", "max_queue=3", "--set", "dtype=float16"),
    ]
    sleepy = ModelEntry(name="m", target="bagel", sleepable=True)
    assert start_words(sleepy) == ["bagel", "--fit", "--set", "sleepable=true"]
    assert start_words(ModelEntry(name="m", target="bagel", file="/f.yaml")) == ["bagel", "--config", "/f.yaml"]


async def test_a_model_without_a_file_is_planned_with_the_one_that_fits(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default file of Qwen3-Omni has two ranks; on one faked device the file for one is taken.

    The gateway takes over what `mstarctl serve` has planned, which is the same.
    """
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    plans = KeptPlans(gateway_folder())
    files = {}
    for fakes in ("cpu:0=2GiB", "cpu:0=2GiB,cpu:1=2GiB"):
        monkeypatch.setenv("MSTAR_FAKE_MEMORY", fakes)
        entry = ModelEntry(name="omni", target="qwen3_omni:tiny", device="cpu", memory_text="900MiB")
        need = await LocalHost().survey(entry)
        assert plans.find(entry, start_words(entry)) is None
        check_starts(ServeFile(models={"omni": entry}), Printer())
        made = msgspec.structs.replace(entry, sleepable=True)  # the default of all models
        assert await LocalHost(("nothing",), plans).survey(made) == need
        files[Path(need.config).stem] = list(need.claims), "qwen3omni_single_gpu fits" in need.why
    assert files == {"qwen3omni_single_gpu": (["cpu-0"], True), "qwen3omni_2gpu": (["cpu-0", "cpu-1"], False)}


async def test_a_plan_is_kept_until_the_entry_its_files_or_the_devices_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, weights = tmp_path / "m.yaml", tmp_path / "weights"
    file.write_text("model: m\n")
    weights.mkdir()
    plans = KeptPlans(tmp_path / "state")
    entry = ModelEntry(name="m", target="a-900-0", file=str(file), weights=str(weights), memory_text="1GiB")
    need = await LocalHost(UP, plans).survey(entry)
    assert need.claims["cpu-0"].need_bytes == 900 << 20
    other = LocalHost(("false",), plans)
    assert await other.survey(entry) == need, "no command runs"

    def changed(**fields: Any) -> bool:
        made = msgspec.structs.replace(entry, **fields)
        return plans.find(made, start_words(made)) is None

    assert changed(memory_text="2GiB") and changed(set={"max_queue": 3}) and not changed(aliases=("x",))
    monkeypatch.setenv("MSTAR_FAKE_MEMORY", "cpu:0=1GiB")
    assert changed()
    monkeypatch.delenv("MSTAR_FAKE_MEMORY")
    assert not changed()
    for path, text in ((file, "model: other\n"), (weights / "part.safetensors", "")):
        path.write_text(text)
        assert changed()
        plans.keep(entry, start_words(entry), need)
        assert not changed()
    with pytest.raises(MstarError):
        await other.survey(ModelEntry(name="n", target="b-900-0"))


def test_the_error_of_a_command_keeps_title_detail_and_code() -> None:
    text = "planning\nerror: GPU 0 is in use  [gpu-in-use, exit 6]\n  deployment 'x' holds it\n  try: mstarctl down x\n"
    error = command_error(text, "m did not start")
    assert (error.title, error.detail, error.hint) == ("GPU 0 is in use", "deployment 'x' holds it", "mstarctl down x")
    assert error.code == "gpu_in_use"
    other: MstarError = command_error("Killed\n", "m did not start")
    assert (other.title, other.detail) == ("m did not start", "Killed")
