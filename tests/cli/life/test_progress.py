"""Progress views of a start, from snapshots; and durations of the command line."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from mstar_core.errors import UsageError
from mstarctl.output import Column, GlobalOptions, render_table
from mstarctl.output.durations import parse_duration
from mstarctl.output.paint import Paint
from mstarctl.output.states import state_role
from mstarctl.start.progress import (
    PlainView,
    Pulse,
    Rates,
    TerminalView,
    bar,
    ready_line,
    row_line,
    row_parts,
    rows_of,
    widths_of,
)


def snapshot(phase: str = "weights", done: int = 1 << 20, total: int = 4 << 20, state: str = "known") -> dict[str, Any]:
    worker = {"name": "worker-0", "state": state, "phase": phase, "done": done, "total": total, "detail": "a\x1b[2Jb"}
    api = {"name": "api", "state": "ready", "phase": "ready", "done": 0, "total": 0, "detail": ""}
    head = {
        "endpoint": "http://h:1",
        "ready_s": 48.12,
        "age_s": 50,
        "phases_s": {"fetch": 21.4, "kv": 1.04, "pool": 0.01},
    }
    children = {"worker-0": worker, "api": api, "supervisor": {"name": "supervisor", "state": "ready"}}
    return {"deployment": head, "ranks": {"0": {"rank": 0, "nodes": ["LLM", "snac"]}}, "children": children}


def test_a_rank_shows_its_nodes_its_bar_and_what_is_left() -> None:
    rows = rows_of(snapshot())
    line = row_line(rows[0], widths_of(rows), rate=1 << 20)
    assert line.split() == [
        "rank",
        "0",
        "LLM",
        "snac",
        "weights",
        bar(0.25),
        "1.0",
        "MiB/4.0",
        "MiB",
        "1.0",
        "MiB/s",
        "3.0",
        "s",
        "left",
        "a\\x1b[2Jb",
    ]
    assert row_line(rows[1], widths_of(rows)).split() == ["api", "http://h:1", "ready"]


def test_counts_are_no_bytes() -> None:
    row = rows_of(snapshot("capture", 17, 24))[0]
    assert row.amount == "17/24"


@pytest.mark.parametrize("share", [0.0, 0.33, 1.0])
def test_a_bar_has_one_width(share: float) -> None:
    assert len(bar(share)) == len(bar(share, is_ascii=True)) == 20


def test_the_last_line_names_the_phases_that_took_time() -> None:
    assert ready_line(snapshot()) == "ready in 48.1 s (fetch 21, kv 1.0)"


def test_a_pipe_gets_a_line_for_each_phase_and_not_for_each_look() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    for state in (snapshot(), snapshot(done=2 << 20), snapshot("kv", 0, 0), snapshot("ready", 0, 0, "ready")):
        view.show(state)
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["MiB", "ready", "kv", "ready"]


def test_a_terminal_is_redrawn_in_place_and_never_wider_than_it_is() -> None:
    stream = io.StringIO()
    view = TerminalView(stream, 40)
    view.show(snapshot())
    view.show(snapshot(done=2 << 20))
    assert stream.getvalue().count("\x1b[2A") == 1
    lines = [
        line.removeprefix("\x1b[2A").removeprefix("\r\x1b[2K")
        for line in stream.getvalue().splitlines()
        if "rank" in line
    ]
    assert all(len(line) < 46 for line in lines)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("1.5s", 1.5), ("10m", 600.0), ("1h30m", 5400.0), ("250ms", 0.25)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1x", "1 s", "1s2", "nan"])
def test_other_words_are_no_times(text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        parse_duration(text, "--x")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_row_in_progress_has_a_spinner_and_the_age_of_its_phase() -> None:
    rows = rows_of(snapshot())
    line = row_parts(rows[0], widths_of(rows), Pulse(spinner="⠹", phase_s=12.4)).plain
    assert line.startswith("⠹ rank 0") and line.rstrip().endswith("12.4 s")
    ready = row_parts(rows[1], widths_of(rows), Pulse(spinner="⠹", phase_s=12.4)).plain
    assert ready.startswith("✓ api") and "12.4" not in ready


def test_a_download_without_data_names_the_network() -> None:
    rows = rows_of(snapshot("fetch"))
    text = row_parts(rows[0], widths_of(rows), Pulse(spinner="|", rate=5.0, still_s=9.0, phase_s=30.0)).plain
    assert "no data from the network for 9.0 s" in text and "/s " not in text and "30.0 s" in text
    rates = Rates()
    rates.pulse(rows[0], 100.0, "|")
    assert rates.pulse(rows[0], 107.0, "|").still_s == 7.0
    (moved,) = (row for row in rows_of(snapshot("fetch", done=2 << 20)) if row.who == "rank 0")
    assert rates.pulse(moved, 108.0, "|").still_s == 0.0


@pytest.mark.parametrize(("has_colour", "variable"), [(True, ""), (False, ""), (True, "1")])
def test_only_a_terminal_without_no_color_gets_colours(
    has_colour: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setenv("TERM", "xterm-256color")
    options = GlobalOptions(color=has_colour)
    coloured = has_colour and not variable
    assert ("\x1b[" in Paint.of(options, Terminal()).text("ready", "ok")) == coloured
    assert Paint.of(options, io.StringIO()).text("ready", "ok") == "ready"


def test_text_without_a_meaning_has_the_terminal_s_own_colour() -> None:
    """The terminal may be light."""
    assert Paint("true").text("orpheus", "value") == "orpheus"
    assert Paint("true").text("orpheus", "strong") == "\x1b[1morpheus\x1b[0m"


def test_a_coloured_table_has_the_cells_of_a_plain_one() -> None:
    items = [{"name": "a", "state": "ready", "note": None}, {"name": "bcd", "state": "failed", "note": "x"}]
    columns = [Column("NAME", "name"), Column("STATE", "state"), Column("NOTE", "note", is_right=True)]
    coloured = render_table(items, columns, colour=lambda text, key, is_title: f"\x1b[1m{text}\x1b[0m")
    assert [re.sub(r"\x1b\[\d*m", "", row) for row in coloured] == render_table(items, columns)
    assert [state_role(word) for word in ("ready", "failed", "draining", "odd")] == ["ok", "bad", "accent", ""]
