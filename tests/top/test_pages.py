"""Every screen at every size: exact widths, and text snapshots."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import msgspec
import pytest

from mstar_core.observe.frames import GpuStatus, RankStatus, RequestStatus
from mstarctl.client.store import Store
from mstarctl.output.theme import ROLES, sgr, style_of
from mstarctl.output.waterfall import parts_lines
from mstarctl.top.data.view import NORMAL, Link, View, size_of
from mstarctl.top.drawing.glyphs import ASCII, UNICODE, Glyphs
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.ranks import blocks
from mstarctl.top.layout.state import State
from tests.top.pictures import EVERY_PAGE, HINTS, SIZES, check, painted, state_of, text_of, view_after, view_of
from tests.top.streams import starting

ODD_SIZES = ((40, 12), (41, 13), (59, 40), (60, 18), (99, 29), (100, 30), (159, 31), (200, 60))


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_a_screen_matches_its_snapshot(page: str) -> None:
    check(page, "\n".join(text_of(painted(page, *size).lines) for size in SIZES))


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_a_screen_in_ascii_matches_its_snapshot(page: str) -> None:
    text = "\n".join(text_of(painted(page, *size, glyphs=ASCII).lines) for size in SIZES[:2])
    assert text.isascii()
    check(f"{page}-ascii", text)


@pytest.mark.parametrize("name", ["orpheus", "lost"])
@pytest.mark.parametrize("page", ["overview", "graph"])
def test_other_deployments_match_their_snapshots(name: str, page: str) -> None:
    check(f"{page}-{name}", "\n".join(text_of(painted(page, *size, name=name).lines) for size in SIZES))


def test_a_start_shows_its_phases() -> None:
    view = view_after(starting())
    text = "\n".join(text_of(compose(view, State(), *size, HINTS).lines) for size in SIZES)
    assert "weights" in text and "41.8/62.1 GiB" in text and "17/24" in text
    check("overview-starting", text)


@pytest.mark.parametrize("size", ODD_SIZES, ids=str)
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("page", EVERY_PAGE)
def test_every_line_fills_the_screen(page: str, glyphs: Glyphs, size: tuple[int, int]) -> None:
    lines = painted(page, *size, glyphs=glyphs).lines
    assert [row.width for row in lines] == [size[0]] * size[1]


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_an_empty_screen_says_so(page: str) -> None:
    for size in ODD_SIZES:
        lines = compose(View(store=Store(), link=Link(state="connecting")), State(page=page), *size, HINTS).lines
        assert [row.width for row in lines] == [size[0]] * size[1]
    assert "no deployment yet" in lines[0].plain


def test_below_the_least_size_one_line_says_so() -> None:
    rows = compose(view_of("qwen3_omni"), State(), 39, 12).lines
    assert rows[0].plain.strip() == "top needs 40x12 cells; this is 39…"[:39] or "40x12" in rows[0].plain
    assert len(rows) == 12 and all(row.width == 39 for row in rows)


def test_the_cause_of_a_failure_is_in_the_header() -> None:
    rows = painted("overview", 120, 34, name="lost").lines
    assert "CUDA out of memory: 2.0 GiB wanted, 0.4 of 79.1 GiB free" in rows[2].plain
    assert "degraded" in rows[0].plain


def test_no_screen_shows_a_control_character() -> None:
    view = view_of("qwen3_omni")
    evil = "r\x1b[2J\u202e\n"
    requests = {key: msgspec.structs.replace(r, id=evil + r.id, why=evil) for key, r in view.store.requests.items()}
    store = view.store.copy()
    store.requests = requests
    for page in EVERY_PAGE:
        for row in compose(replace(view, store=store), state_of(page), 120, 34, HINTS).lines:
            assert row.plain.isprintable()


def test_wide_characters_in_ids_keep_the_columns() -> None:
    view = view_of("qwen3_omni")
    store = view.store.copy()
    store.requests = {
        key: msgspec.structs.replace(r, id="日本語の長い名前" + r.id) for key, r in store.requests.items()
    }
    for size in SIZES:
        lines = compose(replace(view, store=store), state_of("overview"), *size, HINTS).lines
        assert all(row.width == size[0] for row in lines)


@pytest.mark.parametrize("mode", ["true", "ansi", "mono"])
def test_every_role_on_every_screen_has_a_style(mode: str) -> None:
    for page in EVERY_PAGE:
        for row in painted(page, 120, 34).lines:
            sgr(row, mode)  # type: ignore[arg-type]  # one of the three


def test_mono_uses_only_bold_and_reverse() -> None:
    for role in ROLES:
        for mark in ("", "+selected", "+bar", "+off"):
            style = style_of(role + mark, "mono")
            assert (style.fg, style.bg) == ("", "")


def test_ansi_uses_only_the_sixteen_colours() -> None:
    for role in ROLES:
        style = style_of(role, "ansi")
        assert all(colour == "" or 0 <= int(colour) < 16 for colour in (style.fg, style.bg))


def test_many_ranks_fold_to_lines_and_then_to_a_count() -> None:
    gib = 2**30
    store = Store(is_synced=True)
    store.gpus = {
        str(n): GpuStatus(index=n, name="NVIDIA H100", util=0.5, memory_used=gib, memory_total=80 * gib)
        for n in range(8)
    }
    store.ranks = {str(n): RankStatus(rank=n, device=f"cuda:{n}", gpu=str(n), state="ready") for n in range(8)}
    rows = [row.plain for row in blocks(View(store=store), 120, 12, NORMAL)]
    assert sum("gpu" in row for row in rows) == 8
    rows = [row.plain for row in blocks(View(store=store), 120, 4, NORMAL)]
    assert len(rows) <= 4 and any("more ranks" in row for row in rows)


def test_sizes_follow_the_smaller_side() -> None:
    assert [size_of(*size) for size in ((40, 50), (80, 24), (120, 20), (120, 34), (160, 50))] == [0, 1, 1, 2, 3]


def test_requests_that_were_not_sent_are_counted() -> None:
    view = view_of("qwen3_omni")
    store = view.store.copy()
    store.truncated = {"requests": 1200}
    text = text_of(compose(replace(view, store=store), State(), 120, 34, HINTS).lines)
    assert "1200 more were not sent" in text


def test_a_removed_request_is_reported() -> None:
    text = text_of(compose(view_of("qwen3_omni"), State(page="request", request="nope"), 120, 34, HINTS).lines)
    assert "no longer shown" in text


def test_an_error_is_shown_in_the_row_of_its_request() -> None:
    view = view_of("qwen3_omni")
    store = view.store.copy()
    store.requests = {
        "1": RequestStatus(id="r-1", handle=1, state="failed", error="worker_lost", started=1.0, ended=2.0)
    }
    assert "✕ worker_lost" in text_of(compose(replace(view, store=store), State(), 120, 34, HINTS).lines)


def test_an_open_waterfall_stays_after_its_request_has_left_the_store() -> None:
    view, state = view_of("qwen3_omni"), state_of("request")
    request = view.store.requests[state.request]
    assert state.trace is not None and state.trace.status == request
    store = copy(view.store)
    store.requests = {key: r for key, r in view.store.requests.items() if key != state.request}
    text = "\n".join(row.plain for row in compose(replace(view, store=store), state, 120, 34).lines)
    assert request.id in text and "compute" in text and "no longer shown" not in text


def test_a_waterfall_shows_the_parts_of_the_time_as_trace_does() -> None:
    view, state = view_of("qwen3_omni"), state_of("request")
    assert state.trace is not None
    times = {"Thinker": 400.0, "Talker\x1b": 300.0, "parallel work": -100.0}
    parts = tuple({"name": name, "ms": ms} for name, ms in times.items())
    (expected,) = parts_lines({"parts": parts}, 78)
    assert expected == "600 ms = Thinker 400 ms + Talker\\x1b 300 ms - parallel work 100 ms"
    rows = compose(view, replace(state, trace=replace(state.trace, parts=parts)), 80, 34).lines
    assert f" {expected}" in [row.plain.rstrip() for row in rows]
