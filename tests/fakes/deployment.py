"""Fixtures: a deployment of fake children, in this loop or under a supervisor process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import ApiConfig
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client.log_dirs import new_log_dir
from mstarctl.start.launch import Started, launch
from tests.fakes.child import SCRIPTS
from tests.fakes.ports import free_port

MakeSpec = Callable[..., DeploymentSpec]
Launch = Callable[..., Started]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a short folder for run directories. A test's own path is too long for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that scripts failures: `play(worker_0={"phase": "kv", "how": "exit"})`."""

    def set_scripts(**scripts: dict[str, Any]) -> None:
        named = {name.replace("_", "-"): script for name, script in scripts.items()}
        monkeypatch.setenv(SCRIPTS, json.dumps(named))

    set_scripts()
    return set_scripts


@pytest.fixture
def make_spec(runtime: Path) -> MakeSpec:
    """Return a spec with one rank on the CPU; keywords replace fields."""

    def make(name: str = "fake", **fields: Any) -> DeploymentSpec:
        spec = DeploymentSpec(
            name=name,
            model="orpheus",
            plugin="orpheus",
            run_dir=str(RunDirectory.of(name).path),
            log_dir="",
            plan=Plan(
                ranks=(RankPlan(rank=0, device="cpu", nodes=("LLM",)),),
                placements=(NodePlacement(node="LLM", replicas=((0,),)),),
            ),
            api=ApiConfig(host="127.0.0.1", port=free_port()),
        )
        return msgspec.structs.replace(spec, **fields)

    return make


@pytest.fixture
def logged_spec(make_spec: MakeSpec) -> MakeSpec:
    """Return make_spec's result after creating the folders, as `up` does."""

    def make(name: str = "fake", **fields: Any) -> DeploymentSpec:
        spec = make_spec(name, **fields)
        RunDirectory.of(name).create()
        return msgspec.structs.replace(spec, log_dir=str(new_log_dir(name)))

    return make


@pytest.fixture
def start(make_spec: MakeSpec, play: Callable[..., None]) -> Iterator[Launch]:
    """Start a supervisor process with fake children. Its remaining processes are killed at the end."""
    running: list[Started] = []

    def begin(name: str = "fake", **fields: Any) -> Started:
        spec = make_spec(name, **fields)
        running.append(launch(spec, RunDirectory.of(name), "tests.fakes.supervisor"))
        return running[-1]

    yield begin
    for started in running:
        if not started.has_ended:
            os.kill(started.process.pid, signal.SIGKILL)
        started.process.wait(60)
