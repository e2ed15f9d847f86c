"""Deployments of another host through a fake ssh: commands and output are the same as on this host."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode, Unreachable
from mstar_core.host.other_hosts.contexts import Context
from mstarctl.client.admin import AdminClient
from mstarctl.client.tunnel import forwarded
from mstarctl.start.launch import Started, wait_ready

Cli = Callable[..., Any]
Launch = Callable[..., Started]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[list[str]]]:
    """Put an ssh and a mstarctl on the path; what is returned tells the calls so far."""
    programs = {
        "ssh": f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/fakes/ssh.py"} "$@"\n',
        "mstarctl": f'#!/bin/sh\nunset XDG_CONFIG_HOME\nHOME=/nowhere exec {sys.executable} -m mstarctl "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "ssh.log"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), *sys.path])))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "mstar" / "contexts.json"


def test_contexts_are_added_used_shown_and_removed(tool: Cli, settings: Path) -> None:
    assert [(item["name"], item["in_use"]) for item in tool("context", "ls", "-o", "json").items] == [("local", True)]
    assert tool("context", "add", "gpu7", "--ssh", "ana@gpu7", "--socket", "/run/x/admin.sock").code == 0
    assert settings.stat().st_mode & 0o077 == 0
    assert tool("context", "use", "gpu7").code == 0
    shown = tool("context", "show", "-o", "json").items[0]
    assert (shown["name"], shown["ssh"], shown["socket"]) == ("gpu7", "ana@gpu7", "/run/x/admin.sock")
    wrong = tool("context", "use", "gpu8")
    assert (wrong.code, "did you mean 'gpu7'?" in wrong.err) == (ExitCode.NOT_FOUND, True)
    assert tool("context", "rm", "gpu7").code == 0
    assert tool("context", "show", "-o", "name").out == "context/local\n"


@pytest.mark.parametrize(
    "words",
    [
        ("add", "local", "--ssh", "h"),
        ("add", "a/b", "--ssh", "h"),
        ("add", "x", "--ssh", "-oProxyCommand=touch"),
        ("add", "x", "--ssh", "two words"),
        ("rm", "local"),
        ("add", "x"),
    ],
)
def test_what_ssh_would_misread_is_refused(words: tuple[str, ...], tool: Cli, settings: Path) -> None:
    assert tool("context", *words).code == ExitCode.USAGE
    assert not settings.exists()


def test_a_damaged_file_is_named(tool: Cli, settings: Path) -> None:
    settings.parent.mkdir(parents=True)
    settings.write_text("{")
    said = tool("ps")
    assert (said.code, str(settings) in said.err) == (ExitCode.INVALID, True)


def test_verbs_reach_a_deployment_of_another_host_and_a_socket_by_its_path(
    tool: Cli, start: Launch, ssh: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    started = start()
    wait_ready(started, lambda snapshot: None)
    admin = str(Path(started.spec.run_dir) / "admin.sock")
    assert tool("--socket", admin, "ps", "-o", "json").items[0]["name"] == "fake"
    assert tool("--socket", admin, "drain", "other").code == ExitCode.NOT_FOUND
    assert tool("--socket", admin, "-c", "local", "drain").code == ExitCode.USAGE
    gone = tool("--socket", str(tmp_path / "none.sock"), "drain")
    assert gone.code == ExitCode.UNREACHABLE

    tool("context", "add", "gpu7", "--ssh", "ana@gpu7")
    (item,) = tool("-c", "gpu7", "ps", "-o", "json").items
    assert (item["name"], item["state"], item["pid"]) == ("fake", "ready", started.process.pid)
    assert ssh()[-1] == ["--", "ana@gpu7", "mstarctl ps -o json"]
    assert tool("-c", "gpu7", "describe", "rank/0", "-o", "json").items[0]["pid"]
    wrong = tool("-c", "gpu7", "drain", "fakee")
    assert (wrong.code, "did you mean 'fake'?" in wrong.err) == (ExitCode.NOT_FOUND, True)

    # With the socket's place there is nothing to ask for: one ssh a verb.
    tool("context", "add", "fixed", "--ssh", "ana@gpu7", "--socket", admin)
    far = ("-c", "fixed")
    calls = len(ssh())
    kinds = [json.loads(line)["type"] for line in tool(*far, "events", "-o", "json").out.splitlines()]
    assert "deployment.ready" in kinds
    assert all("-N" in words and "-L" in words for words in ssh()[calls:]) and len(ssh()) == calls + 1
    assert "phase" in tool(*far, "logs", "--from", "worker/0", "--tail", "5").out or kinds
    assert json.loads(tool(*far, "api", "GET", "/v1/health").out)["state"] == "ready"

    assert tool("context", "use", "fixed").code == 0
    assert tool("drain", "--wait").code == 0
    assert tool("-c", "local", "ps", "fake", "-o", "json").items[0]["state"] == "draining"
    assert tool("resume").code == 0
    refused = tool("up", "orpheus:tiny")
    assert (refused.code, "ssh -t ana@gpu7 mstarctl up" in refused.err) == (ExitCode.USAGE, True)
    assert tool("down", "--grace", "60s").code == 0
    assert started.process.wait(60) == 0


def test_a_host_that_is_not_there_is_unreachable_with_what_ssh_said(
    tool: Cli, ssh: Callable[[], list[list[str]]]
) -> None:
    tool("context", "add", "far", "--ssh", "nowhere")
    tool("context", "add", "fixed", "--ssh", "nowhere", "--socket", "/run/x/admin.sock")
    for name in ("far", "fixed"):
        said = tool("-c", name, "drain")
        assert (said.code, "No route to host" in said.err) == (ExitCode.UNREACHABLE, True), said.err


def test_a_connection_that_breaks_is_made_again_without_a_question(
    ssh: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    there = tmp_path / "there.sock"
    with answering(there), forwarded(Context(name="gpu7", ssh="ana@gpu7"), str(there)) as local:
        os.kill(int((tmp_path / "ssh.log.pid").read_text()), signal.SIGKILL)
        until(lambda: len(ssh()) == 2 and reaches(local))
        words = ssh()
    assert len(words) == 2 and "BatchMode=yes" in words[1] and "BatchMode=yes" not in words[0]
    assert not local.parent.exists()
    pid = int((tmp_path / "ssh.log.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@contextmanager
def answering(path: Path) -> Iterator[None]:
    """A server at `path` that answers every connection, also those that only look whether it is there."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer() -> None:
            with suppress(OSError):  # the end of the server
                while True:
                    accepted, _ = server.accept()
                    with accepted, suppress(OSError):
                        accepted.sendall(b"here")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def reaches(local: Path) -> bool:
    """Whether a connection to `local` comes out at the server. The old ssh may still take some, and none answers."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(local))
            return client.recv(4) == b"here"
        except OSError:
            return False


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_a_broken_connection_is_called(tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as raised:
        AdminClient(tmp_path / "s", "orpheus", through="gpu7").head()
    assert raised.value.title == "the connection to 'gpu7' is broken"
    with pytest.raises(Unreachable) as raised:
        AdminClient(tmp_path / "s", "orpheus").head()
    assert raised.value.title == "deployment 'orpheus' does not answer"
