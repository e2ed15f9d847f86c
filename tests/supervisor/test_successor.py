"""Replacement of a deployment by another one, with the real supervisors and fake children."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import ExitCode, MstarError
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, gpu_holder
from mstar_core.host.run_dir import RunDirectory, deployments
from mstarctl.client import AdminClient
from mstarctl.client.deployments import known
from mstarctl.start.launch import Started, wait_named, wait_ready
from tests.supervisor.test_main import LIMIT_S, nothing, outcome, wait_until

Launch = Callable[..., Started]
GPU = "GPU-aaaa"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep GPU locks of these tests apart."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))


@pytest.fixture
def replace(start: Launch) -> Launch:
    """Start a deployment that replaces another one."""

    def begin(old: Started, **fields: Any) -> Started:
        api = ApiConfig(host=old.spec.api.host, port=old.spec.api.port, bind_when_ready=True)
        run = RunDirectory.of(old.spec.name).real
        facts = {"api": api, "gpus": old.spec.gpus, "run_dir": str(run.successor.path), "replaces": str(run.path)}
        return start(old.spec.name, **{**facts, **fields})

    return begin


def names() -> list[str]:
    return [run.name for run in deployments() if run.holder() is not None]


def is_held_by(pid: int) -> bool:
    holder = gpu_holder(GPU)
    return holder is not None and holder.pid == pid


def operation_of(started: Started) -> dict[str, Any]:
    with AdminClient.of(started.run, LIMIT_S) as admin:
        latest: dict[str, Any] = admin.head()["operation"]
    return latest


def test_a_successor_takes_name_and_gpus_and_nothing_of_the_old_one_is_left(
    start: Launch, replace: Launch, play: Callable[..., None]
) -> None:
    play(api={"drains": False})
    started = start(gpus={"cuda:0": GPU}, drain_timeout_s=0.5)
    wait_ready(started, nothing)
    play()
    for cut in (["drain took longer than 0.5 s"], []):  # the second one replaces one that has replaced another one
        old, started = started, replace(started)
        wait_ready(started, nothing)
        wait_named(started)
        assert old.process.wait(LIMIT_S) == ExitCode.DONE
        assert outcome(old)["reason"] == "replaced by a new deployment"
        events = [json.loads(line) for line in (old.log_dir / "events.ndjson").read_text().splitlines()]
        assert [event["why"] for event in events if event["type"] == "deployment.cut"] == cut
        assert names() == ["fake"] and RunDirectory.of("fake").real == started.run
        run = RunDirectory.of("fake")
        assert (run.holder(), run.real) == (started.process.pid, started.run)
        wait_until(lambda: is_held_by(started.process.pid), "the lock of the GPU names another holder")  # noqa: B023
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(LIMIT_S) == ExitCode.DONE
    assert gpu_holder(GPU) is None
    assert [path.name for path in run.path.parent.iterdir()] == [".state"]


def test_both_are_known_while_requests_of_the_old_one_finish(
    start: Launch, replace: Launch, play: Callable[..., None]
) -> None:
    play(api={"drains": False})
    old = start(drain_timeout_s=600.0)
    wait_ready(old, nothing)
    new = replace(old)
    snapshot = wait_ready(new, nothing)
    assert names() == ["fake", "fake.next"]
    wait_until(lambda: operation_of(old)["step"] == "requests in flight finish", "it does not begin to drain")
    third = replace(old)
    with pytest.raises(MstarError, match="a replacement is in progress") as refused:
        wait_ready(third, nothing)
    assert refused.value.code == "in_progress"
    with AdminClient.of(old.run, LIMIT_S) as admin:
        os.kill(admin.snapshot()["children"]["api"]["pid"], signal.SIGKILL)  # its requests end with it
    wait_named(new)
    assert old.process.wait(LIMIT_S) == ExitCode.DONE
    with AdminClient.of(RunDirectory.of("fake"), LIMIT_S) as admin:
        assert admin.head()["pid"] == snapshot["deployment"]["pid"] == new.process.pid


def test_the_old_one_serves_on_if_its_successor_fails_to_start(
    start: Launch, replace: Launch, play: Callable[..., None]
) -> None:
    old = start()
    wait_ready(old, nothing)
    play(worker_0={"phase": "kv", "how": "error"})
    new = replace(old)
    with pytest.raises(MstarError, match="worker-0 lacks a file") as caught:
        wait_ready(new, nothing)
    assert caught.value.exit_code is ExitCode.INVALID
    wait_until(lambda: known(old.run).state == "ready", "the old one is not ready")
    assert (operation_of(old)["state"], names()) == ("failed", ["fake"])
    assert not new.run.path.exists()


def test_the_old_one_goes_on_if_its_successor_is_killed_before_it_has_ended(
    start: Launch, replace: Launch, play: Callable[..., None]
) -> None:
    play(api={"drains": False})
    old = start(drain_timeout_s=600.0)
    wait_ready(old, nothing)
    play()
    new = replace(old)
    wait_ready(new, nothing)
    wait_until(lambda: operation_of(old)["done"] == 1, "it does not begin to drain")
    os.kill(new.process.pid, signal.SIGKILL)
    wait_until(lambda: known(old.run).state == "ready", "the old one is not ready")
    again = replace(old, stop_first=True)
    wait_until(lambda: names() == ["fake", "fake.next"], "the name of a killed successor is not free")
    os.kill(old.process.pid, signal.SIGKILL)
    old.process.wait(LIMIT_S)
    wait_ready(again, nothing)
    assert names() == ["fake"] and RunDirectory.of("fake").real == again.run


def test_the_old_one_ends_before_its_successor_starts_processes(start: Launch, replace: Launch) -> None:
    old = start(gpus={"cuda:0": GPU})
    wait_ready(old, nothing)
    new = replace(old, stop_first=True)
    wait_ready(new, nothing)
    assert old.process.wait(LIMIT_S) == ExitCode.DONE
    with AdminClient.of(new.run, LIMIT_S) as admin:
        kinds = [item["type"] for item in admin.lines("/v1/events") if item is not None]
    assert kinds.index("deployment.replaced") < kinds.index("child.spawned")
    assert names() == ["fake"] and RunDirectory.of("fake").real == new.run


def test_a_stopped_start_leaves_the_old_one(start: Launch, replace: Launch, play: Callable[..., None]) -> None:
    play(api={"drains": False})
    old = start(drain_timeout_s=600.0)
    wait_ready(old, nothing)
    new = replace(old, stop_first=True)
    wait_until(
        lambda: known(new.run).state == "starting" and (operation_of(old) or {}).get("done") == 1,
        "it does not begin to drain",
    )
    new.process.send_signal(signal.SIGTERM)
    assert new.process.wait(LIMIT_S) == ExitCode.DONE
    wait_until(lambda: known(old.run).state == "ready", "the old one is not ready")
    assert names() == ["fake"]
