"""The supervisor as a process: sockets, locks, signals, and clean-up after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import ExitCode, MstarError, StartError
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client import AdminClient
from mstarctl.client.deployments import known
from mstarctl.start.launch import Started, wait_ready

Launch = Callable[..., Started]
LIMIT_S = 60.0
SUPERVISOR_BYTES = 60_000_000
"""Limit of the resident memory of an idle supervisor after one read of its metrics."""


def nothing(snapshot: dict[str, Any]) -> None:
    """A view without output."""


def outcome(started: Started) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((started.log_dir / "outcome.json").read_text())
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_only_the_owner_reaches_the_run_directory_and_its_sockets(start: Launch) -> None:
    started = start()
    wait_ready(started, nothing)
    run = started.run
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run.path, run.admin_socket, run.ipc, run.spec)}
    assert modes == {run.name: 0o700, "admin.sock": 0o600, "ipc": 0o700, "spec.json": 0o600}
    sockets = [path for path in run.ipc.iterdir() if path.is_socket()]
    assert sockets and {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}
    assert not list(run.path.glob("start-*.json"))


def test_a_second_start_of_the_name_is_refused_and_the_first_continues(start: Launch) -> None:
    first = start()
    wait_ready(first, nothing)
    second = start()
    with pytest.raises(MstarError) as caught:
        wait_ready(second, nothing)
    assert second.process.wait(LIMIT_S) == ExitCode.START_FAILED
    assert f"pid {first.process.pid}" in outcome(second)["cause"]["detail"]
    assert "already running" in caught.value.title
    wait_until(lambda: known(first.run).state == "ready", "the first start does not answer")
    with pytest.raises(StartError, match="already running"):
        first.run.acquire()


def test_sigterm_drains_and_cleans_up(start: Launch) -> None:
    started = start()
    snapshot = wait_ready(started, nothing)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(LIMIT_S) == ExitCode.DONE
    assert outcome(started)["exit_code"] == 0
    assert all(is_gone(child["pid"]) for child in snapshot["children"].values())
    assert not started.run.path.exists()


def test_a_second_sigterm_does_not_wait_for_the_drain(start: Launch, play: Callable[..., None]) -> None:
    play(api={"drains": False})
    started = start(drain_timeout_s=600.0)
    wait_ready(started, nothing)
    started.process.send_signal(signal.SIGTERM)
    wait_until(lambda: known(started.run).state == "draining", "it never drained")
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(LIMIT_S) == ExitCode.DONE


def test_no_child_outlives_a_killed_supervisor_and_the_next_start_cleans_up(start: Launch) -> None:
    started = start()
    pids = [child["pid"] for child in wait_ready(started, nothing)["children"].values()]
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(LIMIT_S)
    wait_until(lambda: all(is_gone(pid) for pid in pids), "a child outlived its supervisor")
    assert known(started.run).state == "stale"
    left = started.run.uploads / "left"
    left.write_text("a request's media")
    again = start()
    wait_ready(again, nothing)
    assert not left.exists()


def test_a_failed_start_leaves_its_cause_and_no_run_directory(start: Launch, play: Callable[..., None]) -> None:
    play(worker_0={"phase": "kv", "how": "error"})
    started = start()
    with pytest.raises(MstarError) as caught:
        wait_ready(started, nothing)
    error = caught.value
    assert (error.title, error.exit_code) == ("worker-0 lacks a file", ExitCode.INVALID)
    assert error.detail.splitlines() == ["looked in a folder", "in worker-0, phase kv"]
    file, _, line = str(error.facts["log"]).rpartition(":")
    assert "worker-0 lacks a file" in Path(file).read_text().splitlines()[int(line) - 1]
    assert not started.run.path.exists()


def test_a_taken_port_ends_the_start_before_any_child(start: Launch) -> None:
    first = start("one")
    wait_ready(first, nothing)
    with pytest.raises(MstarError, match="is taken") as caught:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            second = start("two", api=ApiConfig(host="127.0.0.1", port=taken.getsockname()[1]))
            wait_ready(second, nothing)
    assert caught.value.exit_code is ExitCode.START_FAILED


def test_the_socket_shows_events_logs_and_errors(start: Launch) -> None:
    started = start()
    wait_ready(started, nothing)
    with AdminClient.of(started.run, LIMIT_S) as admin:
        kinds = [item["type"] for item in admin.lines("/v1/events") if item is not None]
        assert kinds[0] == "deployment.starting" and "deployment.ready" in kinds
        assert "supervisor" in {item["from"] for item in admin.lines("/v1/logs") if item is not None}
        list(admin.lines("/v1/logs", **{"from": "weights"}))  # the process has ended, its log remains
        own = [json.loads(item["line"]) for item in admin.lines("/v1/logs", **{"from": "supervisor"}) if item]
        assert any("deployment.ready" in line["message"] for line in own)
        with pytest.raises(MstarError, match="no process 'wrker'"):
            list(admin.lines("/v1/logs", **{"from": "wrker"}))
        with pytest.raises(MstarError, match="unknown path /v1/deployment/explode"):
            admin.act("explode")
        assert admin.head()["api"] == 1
        assert "mstar_restarts_total" in admin.text("/v1/metrics")
        assert admin.snapshot()["children"]["supervisor"]["resident_bytes"] < SUPERVISOR_BYTES
    assert RunDirectory.of("fake").holder() == started.process.pid
