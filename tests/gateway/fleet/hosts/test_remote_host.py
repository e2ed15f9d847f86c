"""Replicas on other hosts: real agents and supervisors with fake children, behind a fake ssh."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from mstar_core.errors import ConfigError, MstarError, NotFound
from mstar_core.gateway.fleet.clock import MonotonicClock
from mstar_core.gateway.fleet.head import read_head
from mstar_core.gateway.fleet.hosts import remote_host as remote
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.hosts.names import admin_socket_of, forwards_folder
from mstar_core.gateway.fleet.hosts.remote_host import RemoteHost, remote_host
from mstar_core.gateway.fleet.local_host import LocalHost
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import owner_token
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from mstar_core.host.other_hosts.contexts import LOCAL, Context, Contexts
from mstar_core.host.run_dir import deployments
from mstarctl.output import Printer
from mstarctl.start.served_models import check_starts
from tests.fakes.deployment import runtime
from tests.fakes.fleet_program import UP

__all__ = ["runtime"]

ROOT = Path(__file__).resolve().parents[4]
MODEL = "a-900-0"
LIMIT_S = 240.0


class OtherHosts:
    """Two hosts as folders of this machine, which a fake ssh reaches. fleet: with one model on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def running(self, host: str) -> list[str]:
        """Return the deployments that run on a host."""
        return [run.name for run in deployments(self.folder / host / "run") if run.holder() is not None]

    def kill(self, host: str) -> None:
        """Kill all that runs on a host, and all connections to it, and refuse further logins."""
        (self.folder / host / "down").touch()
        pids = [int(path.suffix[1:]) for path in (self.folder / host).glob("ssh.*")]
        pids += [pid for run in deployments(self.folder / host / "run") if (pid := run.holder()) is not None]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def revive(self, host: str) -> None:
        """Let a host be reached again."""
        (self.folder / host / "down").unlink()


@pytest.fixture
def other_hosts(runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[OtherHosts]:
    hosts, programs = runtime / "h", tmp_path / "bin"
    programs.mkdir()
    for name, words in (("ssh", f"{ROOT / 'tests/fakes/ssh.py'}"), ("mstarctl", "-m tests.fakes.host_agent")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), *sys.path])))
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "ssh.log"))
    monkeypatch.setenv("FAKE_SSH_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    contexts = Contexts()
    for name in ("gpu7", "gpu8"):
        (hosts / name).mkdir(parents=True)
        contexts = contexts.added(Context(name=name, ssh=name))
    contexts.save()
    yield OtherHosts(hosts)
    for name in ("gpu7", "gpu8"):
        for run in deployments(hosts / name / "run"):
            if (pid := run.holder()) is not None:
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def fleet_on(state: Path, *hosts: str, replicas: str) -> AsyncIterator[ManagedFleet]:
    entry = ModelEntry(name=MODEL, target=MODEL, memory_text="1GiB", replicas_text=replicas, hosts=hosts)
    serve = ServeFile(models={MODEL: entry}, discover=False)
    made = FleetHosts(lambda name: LocalHost(UP) if name == LOCAL else remote_host(name))
    fleet = ManagedFleet(serve, made, MonotonicClock(), RunningFleet(serve), owner_token(state))
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close(is_final=True)


async def until(is_so: Callable[[], object]) -> None:
    """Wait for a state."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110  # the state is that of other processes
            await asyncio.sleep(0.05)


async def state_of(deployment: str) -> str:
    """Return the state that a deployment reports at its admin socket, once it answers."""
    async with asyncio.timeout(LIMIT_S):
        while (head := await read_head(admin_socket_of(deployment))) is None:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)
    return head.state


def places(fleet: ManagedFleet) -> set[tuple[str, str]]:
    """Return host and state of each deployment."""
    return {(each.host, each.state) for status in fleet.models() for each in status.places}


async def test_a_killed_host_is_marked_lost_and_its_replica_starts_on_another(
    other_hosts: OtherHosts, runtime: Path
) -> None:
    async with fleet_on(runtime / "state", "gpu7", "gpu8", replicas="1") as fleet:
        (replica,) = await fleet.ready(MODEL, lambda progress: None)
        assert replica.deployment == f"gpu7/{MODEL}" and other_hosts.running("gpu7") == [MODEL]
        assert await state_of(replica.deployment) == "ready", "its admin socket is reached here"
        (status,) = fleet.models()
        assert status.held == {"gpu7/cpu:0": 900 << 20} and places(fleet) == {("gpu7", "ready")}

        other_hosts.kill("gpu7")
        await until(lambda: places(fleet) == {("gpu7", "lost"), ("gpu8", "ready")})
        (replica,) = await fleet.ready(MODEL, lambda progress: None)
        assert replica.deployment == f"gpu8/{MODEL}" and other_hosts.running("gpu8") == [MODEL]
        (status,) = fleet.models()
        assert "host 'gpu7' cannot be reached" in status.caution and "No route to host" in status.caution

        other_hosts.revive("gpu7")
        await until(lambda: places(fleet) == {("gpu8", "ready")} and not fleet.models()[0].caution)
    assert other_hosts.running("gpu8") == [], "the gateway ends what it has started there"
    assert not forwards_folder().exists()


async def test_the_next_gateway_finds_a_deployment_of_another_host_and_lets_it_sleep_there(
    other_hosts: OtherHosts, runtime: Path
) -> None:
    entry = ModelEntry(name=MODEL, target=MODEL, memory_text="1GiB", hosts=("gpu7",))
    serve = ServeFile(models={MODEL: entry}, discover=False)
    for is_last in (False, True):
        fleet = ManagedFleet(
            serve,
            FleetHosts(lambda name: LocalHost(UP) if name == LOCAL else remote_host(name)),
            MonotonicClock(),
            RunningFleet(serve),
            owner_token(runtime / "state"),
        )
        await fleet.start()
        (replica,) = await fleet.ready(MODEL, lambda progress: None)
        assert replica.deployment == f"gpu7/{MODEL}"
        async with asyncio.timeout(LIMIT_S):
            while fleet.models()[0].loads != (0 if is_last else 1):  # noqa: ASYNC110  # counted behind the request
                await asyncio.sleep(0.05)
        await fleet.close(is_final=False)
    host = remote_host("gpu7")
    await host.start()
    try:
        need = await host.survey(entry)
        assert [holder.name for holder in host.holders("cpu-0")] == [MODEL] and host.host_memory() > 0
        await host.sleep(MODEL, 1)
        assert sum(holder.held_bytes or 0 for holder in host.holders("cpu-0")) < need.claims["cpu-0"].need_bytes
        await host.wake(MODEL)
        await host.end(MODEL)
        assert host.holders("cpu-0") == () and other_hosts.running("gpu7") == []
    finally:
        await host.close()


async def test_an_unreachable_host_and_another_version_are_named(
    other_hosts: OtherHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_hosts.kill("gpu8")
    for change, name, said in (
        (lambda: None, "gpu8", "No route to host"),
        (lambda: monkeypatch.setattr(remote, "__version__", "0.0.1"), "gpu7", "there, 0.0.1 here"),
    ):
        change()
        host = RemoteHost(name, name)
        await host.start()
        try:
            with pytest.raises(MstarError) as refused:
                await host.end("any")
            assert name in refused.value.title and said in refused.value.detail and refused.value.hint
        finally:
            await host.close()
    with pytest.raises(NotFound, match="no context 'gpu9'"):
        remote_host("gpu9")


def test_calls_of_ssh_never_prompt(other_hosts: OtherHosts, tmp_path: Path) -> None:
    async def once() -> None:
        host = RemoteHost("gpu7", "gpu7")
        await host.start()
        await host.close()

    asyncio.run(once())
    calls = [json.loads(line) for line in (tmp_path / "ssh.log").read_text().splitlines()]
    assert calls and all("BatchMode=yes" in words for words in calls)
    assert calls[0][-3:] == ["--", "gpu7", "mstarctl serve agent"]


def test_a_file_is_checked_on_each_host_before_a_gateway_starts(
    other_hosts: OtherHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    other_hosts.kill("gpu8")
    entry = ModelEntry(name="a", target=MODEL, hosts=("gpu7", "gpu8"), source="serve.yaml:3")
    check_starts(ServeFile(models={"a": entry}), Printer())
    said = capsys.readouterr().err
    assert "a on gpu7" in said and "gpu8" in said and "No route to host" in said
    wrong = msgspec.structs.replace(entry, hosts=("gpu7", "gpu9"))
    with pytest.raises(ConfigError, match="a cannot start: no context 'gpu9'") as refused:
        check_starts(ServeFile(models={"a": wrong}), Printer())
    assert (refused.value.facts["file"], refused.value.facts["line"]) == ("serve.yaml", 3)


async def test_connections_of_a_killed_gateway_are_removed(other_hosts: OtherHosts) -> None:
    left = forwards_folder().with_name("999999999") / "socket"
    left.parent.mkdir(parents=True)
    left.touch()
    host = RemoteHost("gpu7", "gpu7")
    await host.start()
    await host.close()
    assert not left.parent.exists()


def test_a_host_whose_ssh_cannot_be_run_has_a_fault(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ssh", lambda: str(runtime))  # a folder

    async def play() -> MstarError | None:
        host = RemoteHost("gpu7", "gpu7")
        async with asyncio.timeout(LIMIT_S):
            await host.start()
        fault = host.fault
        await host.close()
        return fault

    fault = asyncio.run(play())
    assert fault is not None and fault.code == "host_unreachable"
