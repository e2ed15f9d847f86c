"""Failed starts, one per phase: the last lines of `up` give the root cause once, with the line of the log."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode
from mstarctl.start.launch import launch
from tests.fakes.ports import free_port

Cli = Callable[..., Any]
Play = Callable[..., None]

STALL_S = 10
"""The processes that do not hang may stand still for nearly as long, on a busy machine."""

PHASES = [
    pytest.param("weights", "fetch", "error", ExitCode.INVALID, id="fetch"),
    pytest.param("conductor", "spawn", "signal", ExitCode.START_FAILED, id="spawn"),
    pytest.param("worker_0", "device", "error", ExitCode.INVALID, id="device"),
    pytest.param("worker_0", "weights", "hang", ExitCode.TIMED_OUT, id="weights"),
    pytest.param("worker_0", "kv", "error", ExitCode.INVALID, id="kv"),
    pytest.param("worker_0", "kernels", "exit", ExitCode.START_FAILED, id="kernels"),
    pytest.param("worker_0", "warm", "signal", ExitCode.START_FAILED, id="warm"),
    pytest.param("worker_0", "capture", "error", ExitCode.INVALID, id="capture"),
    pytest.param("api", "pool", "exit", ExitCode.START_FAILED, id="pool"),
]


@pytest.fixture
def up(tool: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`up` of a miniature whose processes are fake children under a real supervisor."""
    monkeypatch.setattr("mstarctl.commands.up.launch", partial(launch, module="tests.fakes.supervisor"))
    return partial(tool, "up", "orpheus:tiny", "--host", "127.0.0.1")


@pytest.mark.parametrize(("child", "phase", "how", "code"), PHASES)
def test_a_start_that_fails_ends_with_its_root_cause(
    up: Cli, play: Play, child: str, phase: str, how: str, code: ExitCode
) -> None:
    play(**{child: {"phase": phase, "how": how}})
    stall = ["--stall", f"{STALL_S}s"] if how == "hang" else []
    words = ["-d"] if phase != "kv" else []  # one of them attached: the same words
    said = up("--port", str(free_port()), *words, *stall)
    name = child.replace("_", "-")
    title, tag, rest = last_error(said.err)
    assert (said.code, tag.partition(", exit ")[2]) == (code, str(int(code))), said.err

    causes = {
        "error": (
            f"{name} lacks a file",
            ["looked in a folder", f"in {name}, phase {phase}", "try: use another folder"],
        ),
        "exit": (f"{name} ended with exit status 23", ["last log line: plain words before the end", f"phase {phase}"]),
        "signal": (f"{name} was killed by SIGKILL", [f"in {name}, phase {phase}", "try: "]),
        "hang": (f"{name} made no progress in phase {phase} for {STALL_S} s", ["it has written nothing to its log"]),
    }
    cause, facts = causes[how]
    assert title == cause
    assert [fact for fact in facts if not any(fact in line for line in rest)] == [], said.err
    assert said.err.count("error:") == 1, "told once"
    assert_a_line_to_open(rest[-1], name)


def test_a_port_that_is_taken_fails_in_the_plan(up: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = up("--port", str(port), "-d")
    title, tag, rest = last_error(said.err)
    assert (title, tag) == (f"port {port} on 127.0.0.1 is taken", "port-in-use, exit 6")
    assert rest[-1].startswith("try: ") and "--port " in rest[-1]


def last_error(text: str) -> tuple[str, str, list[str]]:
    """(title, class and code, lines below) of the error that ends the text."""
    head, *rest = text[text.index("error: ") :].splitlines()
    match = re.fullmatch(r"error: (.*?)  +\[(.*)\]", head)
    assert match is not None, text
    assert all(line.startswith("  ") for line in rest), f"something follows the cause:\n{text}"
    return match[1], match[2], [line.strip() for line in rest]


def assert_a_line_to_open(line: str, child: str) -> None:
    """The log of that child, and a line that it has."""
    match = re.fullmatch(r"log: (.+):(\d+)|log: (.+)", line)
    assert match is not None, line
    path = Path(match[1] or match[3])
    assert path.name == f"{child}.log" and path.exists()
    lines = path.read_text().splitlines()
    assert int(match[2] or 0) <= len(lines) and (match[2] or not lines), line


def test_a_failed_start_is_listed_until_it_is_forgotten(up: Cli, play: Play, tool: Cli) -> None:
    play(worker_0={"phase": "kv", "how": "error"})
    name = ["--name", "gone"]
    for forget in (("ps", "--clear"), ("ps", "gone", "--clear"), ("down", "gone")):
        assert up("--port", str(free_port()), "-d", *name).code != 0
        assert [item["state"] for item in tool("ps", "-o", "json").items] == ["failed"]
        said = tool(*forget)
        assert "gone" in said.err and tool("ps", "-o", "json").items == []
        assert tool("logs", "gone", "--from", "worker/0").out, "its logs stay"
