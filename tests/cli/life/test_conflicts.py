"""Concurrent starts with one name, port or GPU: exactly one succeeds, and the other names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import ExitCode, MstarError
from mstar_core.host.gpu_locks import FOLDER_VARIABLE
from mstarctl.output.options import GlobalOptions
from mstarctl.start.launch import Started, wait_ready
from mstarctl.top.data.deployments import DeploymentSwitcher
from mstarctl.top.data.feed import Feed, LogFeed
from mstarctl.top.data.session import LiveSession
from tests.fakes.ports import free_port

Cli = Callable[..., Any]
Launch = Callable[..., Started]


def ends(*started: Started) -> tuple[Started, MstarError]:
    """The one that becomes ready, and the error of the other. Fails unless it is one of each."""
    ready: list[Started] = []
    errors: list[MstarError] = []
    for start in started:
        try:
            wait_ready(start, lambda snapshot: None)
            ready.append(start)
        except MstarError as error:
            errors.append(error)
    assert (len(ready), len(errors)) == (1, 1), errors
    return ready[0], errors[0]


def test_two_starts_of_one_name_at_once_and_another_beside(start: Launch, tool: Cli) -> None:
    winner, error = ends(start("twin"), start("twin"))
    assert error.title == "deployment 'twin' is already running" and str(winner.process.pid) in error.detail
    assert (error.exit_code, error.code) == (ExitCode.START_FAILED, "name_in_use")
    assert [(item["name"], item["state"]) for item in tool("ps", "-o", "json").items] == [("twin", "ready")]

    wait_ready(start("alone"), lambda snapshot: None)
    assert [item["name"] for item in tool("ps", "-o", "json").items] == ["alone", "twin"]
    said = tool("drain")
    assert (said.code, "2 deployments are running" in said.err, "alone, twin" in said.err) == (4, True, True)
    listed = tool("top", "--once")
    assert (listed.code, "alone" in listed.out, "twin" in listed.out) == (0, True, True)
    assert "memory" in listed.out and "memory" in tool("ps").err
    assert tool("drain", "alone").code == 0
    states = {item["name"]: item["state"] for item in tool("ps", "-o", "json").items}
    assert states == {"twin": "ready", "alone": "draining"}
    others = DeploymentSwitcher(GlobalOptions(), lambda admin: LiveSession(Feed(admin, 4.0), LogFeed(admin)))
    assert [(other.name, other.state, other.load) for other in others.running()] == [
        ("alone", "draining", (0, 0)),
        ("twin", "ready", (0, 0)),
    ]
    with others:
        session, _ = others.go("twin")
        with pytest.raises(MstarError, match="no deployment"):
            others.go("twig")
    assert session.is_live
    typo = tool("down", "alone", "twn")
    assert (typo.code, "did you mean 'twin'?" in typo.err) == (4, True) and len(tool("ps", "-o", "json").items) == 2
    both = tool("down", "alone", "twin", "-o", "json")
    assert [(item["name"], item["state"]) for item in both.items] == [("alone", "stopped"), ("twin", "stopped")]
    assert tool("down", "--all").code == ExitCode.NOT_FOUND


def test_two_starts_on_one_port_at_once(start: Launch) -> None:
    api = ApiConfig(host="127.0.0.1", port=free_port())
    winner, error = ends(start("a", api=api), start("b", api=ApiConfig(host="0.0.0.0", port=api.port)))
    assert error.code == "port_in_use" and f"deployment {winner.spec.name!r}" in error.detail
    assert "--port" in error.hint and error.exit_code is ExitCode.START_FAILED


def test_two_starts_on_one_gpu_at_once(start: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    gpus = {"cuda:0": "GPU-aaaa"}
    winner, error = ends(start("a", gpus=gpus), start("b", gpus=gpus))
    assert error.code == "gpu_in_use" and f"{winner.spec.name!r} (pid {winner.process.pid}" in error.detail
