"""Refusals of `up --replace` before anything starts, and what a plan takes from the old deployment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.deployment import DeploymentSpec, HostPlan
from mstar_core.errors import ExitCode, NotFound, StartError, UsageError
from mstar_core.host.hardware.gpus import Gpu
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client.admin import AdminClient
from mstarctl.start import plan, replaced
from mstarctl.start.launch import Started, wait_ready
from mstarctl.start.options import UpOptions

Cli = Callable[..., Any]
Launch = Callable[..., Started]
UP = ("up", "orpheus:tiny", "--device", "cpu", "-d")


def nothing(snapshot: dict[str, Any]) -> None:
    """A view that shows nothing."""


def test_a_replacement_that_cannot_be_is_refused_and_the_old_one_serves_on(
    tool: Cli, start: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = start()
    wait_ready(old, nothing)
    port = old.spec.api.port
    for words, code, text in (
        (("--replace", "fak"), ExitCode.NOT_FOUND, "did you mean 'fake'?"),
        (("--replace", "fake", "--port", "1"), ExitCode.INVALID, f"fake serves on 127.0.0.1:{port}"),
        (("--replace", "fake", "--host", "0.0.0.0"), ExitCode.INVALID, "from --host"),
        (("--replace", "fake", "--name", "other"), ExitCode.USAGE, "omit --name"),
        (("--stop-first",), ExitCode.USAGE, "--stop-first needs --replace"),
        (("--replace", "fake", "--ray", "auto"), ExitCode.USAGE, "--replace and several hosts exclude each other"),
    ):
        refused = tool(*UP, *words)
        assert (refused.code, text in refused.err) == (code, True), refused.err

    same = tool(*UP, "--replace", "fake", "--port", str(port), "--name", "fake", "--dry-run", "-o", "json")
    assert [(item["name"], item["port"]) for item in same.items] == [("fake", port)]

    monkeypatch.setattr(replaced, "free_bytes", lambda keys, gpus: 1)
    monkeypatch.setattr(plan, "weights_on_devices", lambda model, plan, config: 4097)
    short = tool(*UP, "--replace", "fake")
    assert (short.code, "4,096 bytes too few" in short.err, "--stop-first" in short.err) == (6, True, True), short.err
    assert tool(*UP, "--replace", "fake", "--stop-first", "--dry-run").code == 0
    assert [(item["name"], item["state"]) for item in tool("ps", "-o", "json").items] == [("fake", "ready")]

    tool("drain", "--wait")
    late = tool(*UP, "--replace", "fake")
    assert (late.code, "it is draining" in late.err) == (ExitCode.UNREACHABLE, True), late.err


def test_a_deployment_that_ends_while_it_is_looked_at_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "holder", lambda run: 1)
    monkeypatch.setattr(replaced, "deployments", lambda root: [RunDirectory(tmp_path / "fake")])
    monkeypatch.setattr(AdminClient, "snapshot", lambda admin, parts: {"deployment": {"state": "ready"}})
    with pytest.raises(NotFound, match="has just ended"):
        replaced.find_replaced(UpOptions(replace="fake"))


def test_a_deployment_on_several_hosts_is_not_replaced(make_spec: Callable[..., DeploymentSpec]) -> None:
    spec = make_spec(hosts=(HostPlan(name="", address="10.0.0.1", title="gpu-a"),))
    old = replaced.Replaced(run=RunDirectory.of("fake"), spec=spec, snapshot={})
    with pytest.raises(UsageError, match="several hosts") as raised:
        old.taken_over(spec, UpOptions(replace="fake"))
    assert "fake runs on gpu-a" in raised.value.detail


@pytest.mark.parametrize(
    ("free", "needed", "stop_first", "short"),
    [(80, 30, False, None), (20, 10, False, "40"), (20, 30, True, None), (20, 90, True, "10"), (70, 75, False, "5")],
)
def test_memory_of_gpus_is_compared_with_what_the_old_one_uses(
    make_spec: Callable[..., DeploymentSpec], free: int, needed: int, stop_first: bool, short: str | None
) -> None:
    spec = make_spec(gpus={"cuda:0": "GPU-a"})
    ranks = {"0": {"device": "cuda:0", "memory_used": 60}}
    old = replaced.Replaced(run=RunDirectory.of("fake"), spec=spec, snapshot={"ranks": ranks, "children": {}})
    gpu = Gpu(name="a", driver="", free=free, total=100, uuid="GPU-a")

    def check() -> None:
        replaced.check_beside(old, spec, {"cuda:0": "GPU-a"}, [gpu], needed, stop_first=stop_first)

    if short is None:
        check()
        return
    with pytest.raises(StartError, match="does not fit") as caught:
        check()
    assert f" {short} bytes too few" in caught.value.detail
    assert ("--stop-first" in caught.value.hint) is not stop_first
