"""`mstarctl top` without a live terminal: one screen, frames, errors, a crash. Textual is not imported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode, MstarError
from mstarctl.commands.top import crashed, look_of
from mstarctl.main import run
from mstarctl.output import Printer
from mstarctl.top.data.view import Link
from mstarctl.top.drawing.glyphs import ASCII, UNICODE
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.state import State
from tests.top.pictures import replayed
from tests.top.recorded import RECORDINGS

QWEN = str(RECORDINGS / "qwen3_omni.mstar.gz")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the width of the terminal, no colour and no ssh connection."""
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "SSH_CONNECTION", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_once_prints_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--replay", QWEN, "--once"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(" qwen3_omni ● ready") and "REQUEST" in out and "\x1b" not in out
    assert "\n\n\n" not in out and max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("page", ["graph", "ranks", "events", "logs", "bench", "requests"])
def test_once_prints_any_screen(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--replay", QWEN, "--once", "--view", page]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_once_and_json_have_the_figures_of_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--replay", QWEN, "--once"]) == 0
    once = capsys.readouterr().out.splitlines()
    view = replace(replayed("qwen3_omni").view(), link=Link(state="replay", progress=1.0))
    shown = [row.plain.rstrip() for row in compose(view, State(), 120, 34, []).lines]
    assert once[:2] == shown[:2]
    drawn = [row for row in shown if row[:2] in (" r", "╭─", "│ ", "╰─")]
    assert len(drawn) > 15 and [row for row in drawn if row.rstrip("│█ ") not in "\n".join(once)] == []

    assert run(["top", "--replay", QWEN, "--once", "-o", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    head = item["deployment"]
    assert f"{head['running']} run  {head['waiting']} queued" in once[0]
    assert f"p50 {head['ttft_p50_ms']:.0f} p99 {head['ttft_p99_ms']:.0f} ms" in once[0]
    ids = {row.split()[0] for row in once if row.startswith(" r-")}
    assert ids == {request["id"] for request in item["requests"].values()}


def test_once_applies_the_filter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--replay", QWEN, "--once", "--filter", "node:Thinker"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith(" r-")]
    assert rows and all("Thinker" in row for row in rows)


def test_once_in_ascii_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--replay", QWEN, "--once", "--ascii"]) == 0
    assert capsys.readouterr().out.isascii()
    assert run(["top", "--replay", QWEN, "--once", "-o", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert item["deployment"]["name"] == "qwen3_omni" and item["requests"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--view", "grpah"], ExitCode.USAGE, "did you mean 'graph'"),
        (["--filter", "nod:x"], ExitCode.USAGE, "did you mean 'node'"),
        (["--replay", "no-such-file", "--once"], ExitCode.NOT_FOUND, "no recording"),
        (["--replay", QWEN, "--record", "x"], ExitCode.USAGE, "exclude each other"),
        (["--replay", QWEN], ExitCode.USAGE, "top needs a terminal"),
    ],
)
def test_invalid_options_are_refused_by_name(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", *words]) == code
    assert said in capsys.readouterr().err


def test_once_loads_neither_textual_nor_rich(fresh_mstarctl: Callable[..., Any]) -> None:
    fresh = fresh_mstarctl("top", "--replay", QWEN, "--once")  # -o json would return before the layout
    assert fresh.code == 0, fresh.stderr
    assert fresh.loaded(("textual", "rich", "torch", "sanic", "numpy")) == set()


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({"COLORTERM": "truecolor", "TERM": "xterm"}, "true"),
        ({"TERM": "xterm-256color"}, "true"),
        ({"TERM": "xterm"}, "ansi"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "mono"),
        ({"TERM": "vt100"}, "mono"),
    ],
)
def test_the_environment_selects_the_colours(
    environment: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    look = look_of(Printer(), is_ascii=False, is_mono=False)
    assert (look.mode, look.glyphs, look.is_remote) == (mode, UNICODE, False)


def test_ssh_and_flags_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 22 10.0.0.2 22")
    look = look_of(Printer(), is_ascii=True, is_mono=True)
    assert (look.mode, look.glyphs, look.is_remote) == ("mono", ASCII, True)


def test_a_crash_leaves_a_file_with_the_traceback_and_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        told = crashed(error, replayed("lost"))
    assert isinstance(told, MstarError) and "ZeroDivisionError: a bug" in told.detail
    text = Path(str(told.facts["log"])).read_text(encoding="utf-8")
    assert "Traceback" in text and re.search(r'"name": ?"qwen3_omni"', text)
