"""The parts of screens: columns, order, scrolling, waterfalls, bars, exports."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.errors import MstarError
from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import RankStatus, RequestStatus
from mstar_core.observe.request_log import request_item
from mstarctl.client.store import Store
from mstarctl.commands.requests import in_turn
from mstarctl.output.facts import facts_text
from mstarctl.output.line import line
from mstarctl.top.data.spans import Bar, Lane, lanes
from mstarctl.top.data.view import View
from mstarctl.top.drawing.bars import area, bar, nice_top, resample, spark, stacked
from mstarctl.top.drawing.glyphs import ASCII, UNICODE
from mstarctl.top.drawing.numbers import age, amount, ms, rate
from mstarctl.top.drawing.svg import CELL_H, CELL_SHAPES, CELL_W, svg
from mstarctl.top.export import export, perfetto, table_csv
from mstarctl.top.layout import ranks as rank_rows
from mstarctl.top.layout.bench import bench_page
from mstarctl.top.layout.dialogs import fields_rows
from mstarctl.top.layout.ranks import Curve, chart
from mstarctl.top.layout.request_list import BY_KEY, SORTS, Sort, choose, chosen, note, speed
from mstarctl.top.layout.scroll import Window, moved, scrolled
from mstarctl.top.layout.waterfall import Zoom, cells, mark_names, scale, title, waterfall
from tests.top.pictures import painted, view_of
from tests.top.recorded import span

FEW = settings(max_examples=40, deadline=None)
SHARES = st.one_of(st.none(), st.floats(-1, 2, allow_nan=False))


@FEW
@given(SHARES, st.integers(1, 50), st.sampled_from([UNICODE, ASCII]))
def test_a_bar_fills_its_width(share: float | None, width: int, glyphs: object) -> None:
    assert bar(share, width, glyphs).width == width  # type: ignore[arg-type]  # one of the two sets


@FEW
@given(st.lists(SHARES, max_size=20), st.integers(0, 12))
def test_a_sparkline_fills_its_width(values: list[float | None], width: int) -> None:
    assert len(spark(values, width, UNICODE)) == width


@FEW
@given(st.lists(st.floats(0, 1), max_size=5), st.integers(1, 60))
def test_a_bar_of_parts_fills_its_width(shares: list[float], width: int) -> None:
    assert stacked([(share, "#", "bar") for share in shares], width, ".").width == width


@FEW
@given(st.lists(SHARES, max_size=400), st.integers(1, 60), st.integers(1, 10))
def test_a_chart_fills_its_cells(values: list[float | None], width: int, height: int) -> None:
    rows = area(values, width, height, nice_top(values), UNICODE)
    assert [row.width for row in rows] == [width] * height


def test_a_sparkline_shows_levels() -> None:
    assert spark([0, 1, 2, 4, None, 8], 6, UNICODE) == "▁▁▂▄ █"
    assert spark([1.0], 3, ASCII, peak=1.0) == "  @"


def test_many_values_keep_their_peaks() -> None:
    assert resample([0, 9, 0, 0, 1, 2], 3) == [9, 0, 2]


@pytest.mark.parametrize(("value", "top"), [(0.3, 1), (1, 1), (3, 5), (7, 10), (120, 200), (5000, 5000)])
def test_charts_end_at_round_numbers(value: float, top: float) -> None:
    assert nice_top([value]) == top


def test_a_follower_shows_its_leader_and_its_group() -> None:
    store = Store()
    store.ranks = {
        "0": RankStatus(rank=0, state="ready", nodes=["LLM"], group=[0, 1], epoch=2),
        "1": RankStatus(rank=1, state="ready", follows=["LLM"], group=[0, 1], epoch=2, plans=17),
    }
    view = replace(view_of("qwen3_omni"), store=store)
    leader, follower = (
        " ".join(row.plain for row in rank_rows.block(view, store.ranks[key], 120)) for key in ("0", "1")
    )
    assert "group 0 1" in leader and "follows" not in leader
    assert "follows rank 0" in follower and "epoch 2" in follower and "plans 17" in follower


def test_numbers_are_short() -> None:
    assert (ms(5.24), ms(612.4), ms(None)) == ("5.2", "612", "-")
    assert (rate(0.41), rate(412.4), rate(18_640)) == ("0.4", "412", "18.6k")
    assert (age(2.94), age(125), age(None)) == ("2.9s", "2m05s", "-")
    assert amount(77_092_000_000, 84_933_000_000) == "71.8/79.1 GiB"


# -- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "keys"),
    [
        (40, "id at age"),
        (80, "id at age ttft tokens wait"),
        (120, "id route at rank age ttft ttfa tokens audio wait"),
        (180, "id route at rank start age ttft ttfa tokens audio speed wait pages prompt"),
    ],
)
def test_columns_follow_the_width(width: int, keys: str) -> None:
    columns, rest = choose(width)
    assert " ".join(column.key for column in columns) == keys
    assert 1 + sum(column.width + 2 for column in columns) + rest == width


@pytest.mark.parametrize("key", SORTS)
@pytest.mark.parametrize("is_rising", [False, True])
def test_the_rows_are_in_the_order_of_the_arrow(key: str, is_rising: bool) -> None:
    """Running, waiting and ended requests alike; unknown values come last in both directions."""
    view, order = view_of("qwen3_omni"), BY_KEY[key].sort
    assert order is not None
    values = [order(r, view.t) for _, r in chosen(view, Sort(key=key, is_rising=is_rising))]
    known: list[Any] = [value for value in values if value is not None]
    assert len(values) == len(view.store.requests)
    assert known == sorted(known, reverse=not is_rising) == values[: len(known)]


def test_without_a_choice_waiting_requests_come_after_running_ones_and_ended_ones_last() -> None:
    """The oldest come first, and of those that ended the latest end."""
    view = view_of("qwen3_omni")
    rows = [r for _, r in chosen(view, Sort())]
    places = ["ended" if r.has_ended else "queue" if r.state == "queue" else "run" for r in rows]
    assert places == sorted(places, key=("run", "queue", "ended").index)
    ages = [r.age_s(view.t) for r in rows if r.state == "run"]
    ends = [r.ended for r in rows if r.ended is not None]
    assert ages == sorted(ages, reverse=True) and ends == sorted(ends, reverse=True)


def test_requests_lists_in_the_same_order_as_top() -> None:
    view = view_of("qwen3_omni")
    items = [request_item(r, view.t) for r in view.store.requests.values()]
    expected = [r.id for _, r in chosen(view, Sort())]
    assert [item["id"] for item in in_turn(items, is_ascending=False)] == expected


def test_the_speed_of_a_request_is_of_what_it_makes() -> None:
    """60 tokens within 3 s after the first of them; 4 s of audio within 2 s."""
    text = RequestStatus(id="t", handle=1, outputs=["text"], started=10.0, ttft_ms=1000.0, tokens=61, state="run")
    sound = RequestStatus(id="a", handle=2, outputs=["audio"], started=10.0, ended=12.0, audio_s=4.0)
    assert speed(text, 14.0) == pytest.approx(20.0) and speed(sound, 99.0) == pytest.approx(2.0)
    assert speed(RequestStatus(id="n", handle=3, outputs=["text"], started=1.0), 2.0) is None


def test_a_filter_keeps_matching_rows() -> None:
    view = replace(view_of("qwen3_omni"), filter=Filter.parse("node:Thinker tokens>100"))
    actual = [r for _, r in chosen(view, Sort())]
    assert actual and all(r.node == "Thinker" and r.tokens > 100 for r in actual)
    everything = view_of("qwen3_omni").store.requests.values()
    assert len(actual) == sum(r.node == "Thinker" and r.tokens > 100 for r in everything)


@FEW
@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 40), st.integers(-5, 40))
def test_the_window_holds_the_cursor(count: int, height: int, offset: int, at: int) -> None:
    keys = [str(n) for n in range(count)]
    actual = scrolled(keys, Window(offset=offset, cursor=str(at)), height)
    shown = keys[actual.offset : actual.offset + height]
    assert len(shown) == min(count, height)
    assert str(at) not in keys or str(at) in shown


def test_the_cursor_follows_its_row() -> None:
    window = moved(["a", "b", "c"], Window(cursor="b"), 1)
    assert window.cursor == "c"
    assert scrolled(["x", "y", "z", "c"], replace(window, offset=0), 2) == Window(offset=2, cursor="c")
    assert moved([], window, 1) is window


# -- waterfalls ---------------------------------------------------------------------------------------------------

BARS = st.lists(
    st.tuples(st.sampled_from(["queue", "compute", "transfer", "stall"]), st.floats(0, 5000), st.floats(0, 800)),
    max_size=20,
).map(lambda found: tuple(Bar(kind=kind, start_ms=start, end_ms=start + length) for kind, start, length in found))


@FEW
@given(BARS, st.integers(8, 120), st.floats(0, 4000), st.floats(1, 6000))
def test_bars_fill_their_cells(bars: tuple[Bar, ...], width: int, start: float, span_ms: float) -> None:
    assert cells(View(store=view_of("qwen3_omni").store), bars, start, span_ms, width).width == width


@FEW
@given(st.floats(0, 1e6), st.floats(1, 1e6), st.integers(8, 120))
def test_a_scale_fills_its_cells(start: float, span_ms: float, width: int) -> None:
    assert len(scale(start, span_ms, width)) == width


@FEW
@given(BARS, st.sampled_from([120, 80, 40]))
def test_a_waterfall_fills_its_lines(bars: tuple[Bar, ...], width: int) -> None:
    actual = [
        Lane(place="rank 0", label="日本 decode", bars=bars, note="312 steps"),
        Lane(place="api", label="p", bars=()),
    ]
    rows = waterfall(View(store=view_of("qwen3_omni").store), actual, width)
    assert [row.width for row in rows] == [width] * 3


@pytest.mark.parametrize(
    ("marks", "drawn"),
    [
        ([(100.0, "TTFT")], "    ↓TTFT 100 ms                        "),
        ([(900.0, "TTFT")], "                         TTFT 900 ms↓   "),
        ([(400.0, "TTFT"), (450.0, "TTFA")], "     TTFT 400 ms↓ ↓TTFA 450 ms          "),
        ([(100.0, "TTFT"), (150.0, "TTFA")], "    ↓ ↓TTFA 150 ms                      "),
    ],
)
def test_marks_of_a_waterfall_are_named_where_there_is_room(marks: list[tuple[float, str]], drawn: str) -> None:
    assert mark_names(View(store=Store()), marks, 0.0, 1000.0, 40) == drawn


def test_a_short_step_still_takes_a_cell() -> None:
    view = view_of("qwen3_omni")
    row = cells(view, [Bar(kind="compute", start_ms=500, end_ms=500.1)], 0, 1000, 10)
    assert row.plain == "     █    "


def test_zoom_stays_inside_the_request() -> None:
    zoom = Zoom().closer(1000, 2.0)
    assert (zoom.start_ms, zoom.span_ms) == (250, 500)
    assert zoom.moved(1000, -10).start_ms == 0
    assert zoom.moved(1000, 10).start_ms == 500
    assert zoom.closer(1000, 0.5) == Zoom()


def test_spans_become_lanes_by_place_node_and_walk() -> None:
    spans = [
        span("queue", "Thinker", "decode", 100, 200, "worker-1"),
        span("compute", "Thinker", "decode", 200, 1200, "worker-1", count=200, batch=14),
        span("compute", "parse", "", 0, 20, "api"),
        span("transfer", "hidden", "", 300, 400, "worker-0", size_bytes=2_516_582),
        span("compute", "Talker", "decode", 400, 500, "worker-0", is_open=True),
    ]
    actual = lanes({"spans": spans, "sums": []}, 2100)
    assert [(lane.place, lane.label, lane.note) for lane in actual] == [
        ("api", "parse", "20 ms"),
        ("rank 1", "Thinker decode", "1.0 s, 200 steps, b14"),
        ("rank 0", "hidden", "2.4 MiB"),
        ("rank 0", "Talker decode", "100 ms"),
    ]
    assert actual[1].bars[0] == Bar(kind="queue", start_ms=100, end_ms=200)
    assert actual[3].bars[0].end_ms == 2100


def test_one_bar_from_the_sums_stands_for_dropped_spans() -> None:
    spans = [span("compute", "LLM", "decode", 900 + n, 901 + n, "worker-0", batch=8) for n in range(100)]
    total = {
        "process": "worker-0",
        "rank": 0,
        "kind": "compute",
        "node": "LLM",
        "walk": "decode",
        "start_ms": 100.0,
        "end_ms": 1000.0,
        "busy_ms": 450.0,
        "spans": 900,
        "count": 900,
        "size_bytes": 0,
    }
    (lane,) = lanes({"spans": spans, "sums": [total]}, 1000)
    assert lane.note == "450 ms, 900 steps, b8"
    assert Bar(kind="compute", start_ms=100, end_ms=900, busy_ms=350) in lane.bars, "100 ms are in the kept spans"


# -- words --------------------------------------------------------------------------------------------------------


def test_a_phase_event_names_the_new_phase_and_the_duration_of_the_last() -> None:
    facts = {"child": "worker-0", "phase": "device", "total": 0, "detail": "cpu", "after": "spawn", "after_s": 5.12}
    assert facts_text(facts) == "worker-0 enters device (cpu)   spawn took 5.1 s"
    assert facts_text({"child": "api", "phase": "kv", "after": "device", "after_s": 0.0}) == "api enters kv"


@pytest.mark.parametrize("width", [40, 69])
def test_a_narrow_load_test_shows_name_state_and_progress(width: int) -> None:
    item: dict[str, object] = {
        "id": "r1",
        "name": "sweep-of-orpheus",
        "state": "recording",
        "progress": {"done": 1, "total": 4},
    }
    rows, keys = bench_page(View(store=Store(), recordings=[item]), width, 5, Window())
    assert (keys, {row.width for row in rows}) == (["r1"], {width})
    assert rows[0].plain.split() == ["RECORDING", "STATE", "DONE"]
    assert rows[1].plain.split() == ["sweep-of-orpheus", "recording", "25", "%"]


def test_an_empty_chart_has_no_scale() -> None:
    rows = chart(View(store=Store()), Curve(title="LLM step", values=[None, None], now=None, unit="ms"), 40, 8)
    assert [row.plain.strip() for row in rows] == ["LLM step  -", "no figures", "", "", "", "", "", ""]
    assert {row.width for row in rows} == {40}


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (40, "✓enc ▶think ▶talker_decode ▶wav "),
        (32, "✓enc ▶think ▶talker_decode ▶wav "),
        (30, "✓1 ▶think ▶talker_decode ▶wav "),
        (27, "▶think ▶talker_decode ▶wav "),
        (26, "▶think ▶talker_decode ▶wav "),
        (25, "▶think ▶talker_decode +1"),
        (16, "▶think ▶talker_decode"),
        (14, "▶think ▶talker_decode"),
    ],
)
def test_walks_are_named_if_there_is_room(width: int, text: str) -> None:
    """The table clips long names."""
    request = RequestStatus(id="r", handle=1, state="run", active=["think", "talker_decode", "wav"], walks={"enc": 1})
    assert note(View(store=Store()), request, width).plain == text


@pytest.mark.parametrize(
    ("width", "text"),
    [(50, "step 23 of 49, 5.2/s ✓1 ▶image_gen "), (24, "step 23 of 49, 5.2/s "), (10, "")],
)
def test_the_steps_of_an_image_come_before_its_walks(width: int, text: str) -> None:
    request = RequestStatus(
        id="r", handle=1, state="run", active=["image_gen"], walks={"prefill_text": 1}, step=23, steps=49, step_rate=5.2
    )
    view = View(store=Store())
    assert note(view, request, width).plain.replace("✓prefill_text", "✓1") == text
    assert "step 23 of 49" in title(view, request, 120).plain


# -- exports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csv", "json", "snapshot", "txt", "svg"])
def test_an_export_can_be_read_again(form: str, tmp_path: object) -> None:
    view = replace(view_of("qwen3_omni"), filter=Filter.parse("state:run"))
    rows = painted("overview", 120, 34).lines
    path = export(form, view, Sort(), rows, tmp_path)  # type: ignore[arg-type]  # a path
    text = path.read_text(encoding="utf-8")
    running = [r.id for _, r in chosen(view, Sort())]
    match form:
        case "csv":
            actual = list(csv.DictReader(io.StringIO(text)))
            assert [row["id"] for row in actual] == running
            assert {row["route"] for row in actual} == {"/generate"} and "audio" in {row["inputs"] for row in actual}
            assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", row["started"]) for row in actual)
            assert "None" not in text
        case "json":
            assert [item["id"] for item in json.loads(text)["items"]] == running
        case "snapshot":
            assert json.loads(text)["requests"].keys() == view.store.requests.keys()
        case "txt":
            assert text.splitlines()[0] == rows[0].plain.rstrip()
        case "svg":
            assert "qwen3_omni" in "".join(ElementTree.fromstring(text).itertext())
    assert export(form, view, Sort(), rows, tmp_path) != path  # type: ignore[arg-type]  # a path


def test_an_svg_draws_blocks_and_lines_as_shapes() -> None:
    """Fonts leave gaps between them; shapes fill the cells exactly."""
    drawn = {*"".join((UNICODE.steps, UNICODE.eighths, UNICODE.lines, UNICODE.heavy, UNICODE.frame, UNICODE.box))}
    text = "".join(sorted(drawn | {UNICODE.full, UNICODE.rest, UNICODE.cursor, *UNICODE.spans.values()} - {" "}))
    picture = ElementTree.fromstring(svg([line("ab " + text + " cd")]))
    areas, marks = picture.findall("{*}g")
    assert [mark.text for mark in marks.findall("{*}text")] == ["ab", "cd"]
    ends = [float(mark.attrib["x"]) + float(mark.attrib["textLength"]) for mark in marks.findall("{*}text")]
    assert ends[1] == pytest.approx((len(text) + 6) * CELL_W, abs=0.2)
    blocks, paths = areas.findall("{*}rect"), marks.findall("{*}path")
    assert len(blocks) == sum(char in CELL_SHAPES for char in text) and paths
    for block in blocks:
        top, height = float(block.attrib["y"]), float(block.attrib["height"])
        assert 0 <= top and 0 < height and top + height <= CELL_H + 0.01


def test_rows_of_a_chart_have_no_gaps() -> None:
    rows = [line((row, "chart.0")) for row in ("▂█", "██", "██")]
    areas = ElementTree.fromstring(svg(rows)).findall("{*}g")[0].findall("{*}rect")
    edges = {float(a.attrib["y"]) for a in areas}
    ends = {round(float(a.attrib["y"]) + float(a.attrib["height"]), 2) for a in areas}
    assert {16.5, 33.0} <= edges & ends and max(ends) == 49.5


def test_a_failed_export_names_the_path(tmp_path: object) -> None:
    with pytest.raises(MstarError, match="cannot be written"):
        export("csv", view_of("qwen3_omni"), Sort(), [], tmp_path / "no" / "such")  # type: ignore[operator]  # a path


def test_an_id_cannot_be_a_spreadsheet_formula() -> None:
    view = view_of("qwen3_omni")
    store = view.store.copy()
    store.requests = {"1": msgspec.structs.replace(next(iter(store.requests.values())), id="=HYPERLINK(1)")}
    assert "'=HYPERLINK(1)" in table_csv(replace(view, store=store), Sort())


def test_a_perfetto_file_has_a_track_for_each_lane() -> None:
    actual = lanes({"spans": [span("compute", "LLM", "decode", 0, 500, "worker-0")]}, 1000)
    events = json.loads(perfetto("r-1", actual))["traceEvents"]
    assert {"ph": "X", "ts": 0, "dur": 500_000}.items() <= events[-1].items()
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"r-1", "rank 0 LLM decode"}


def test_the_bench_screen_shows_the_running_test_and_says_how_to_start_one() -> None:
    told: dict[str, object] = {
        "test": "tts-short",
        "load": "poisson 4/s",
        "phase": "measured",
        "elapsed_s": 12.0,
        "sent": 48,
        "done": 40,
        "in_flight": 8,
        "errors": 1,
        "share": 0.2,
        "ttfa": {"p50": 214.0, "p90": 500.0, "p99": 612.0, "unit": "ms"},
        "goals": {"ttfa<300ms": 0.97},
        "goodput": 3.8,
        "history": [200.0, 230.0],
    }
    item: dict[str, object] = {"id": "r1", "name": "bench", "state": "recording", "progress": told}
    for width in (40, 80, 120):
        rows, _ = bench_page(View(store=Store(), recordings=[item]), width, 16, Window())
        assert (len(rows), {row.width for row in rows}) == (16, {width})
        text = "\n".join(row.plain for row in rows)
        assert "poisson 4/s" in text and "p50 214 ms" in text and "ttfa<300ms" in text and "97 %" in text
    warm_up = {**told, "phase": "warm-up", "done": 3, "total": 20, "share": 0.15, "left_s": 42.0}
    rows, _ = bench_page(View(store=Store(), recordings=[{**item, "progress": warm_up}]), 80, 16, Window())
    text = "\n".join(row.plain for row in rows)
    assert "warm-up" in text and "15 %  3/20  about 42.0 s left" in text
    empty, _ = bench_page(View(store=Store()), 80, 8, Window())
    assert "mstarctl bench run" in "\n".join(row.plain for row in empty)


def test_fields_of_a_request_are_values_for_people() -> None:
    view = view_of("qwen3_omni")
    request = next(r for _, r in chosen(view, Sort()) if r.ended is None)
    drawn = {row.plain[:15].strip(): row.plain.split()[-1] for row in fields_rows(view, request, 80)}
    assert drawn["ended"] == "-" and "handle" not in drawn
    assert re.fullmatch(r"\d\d:\d\d:\d\d", drawn["started"])
    assert drawn["started"] == view.clock(view.epoch_s + request.started)
