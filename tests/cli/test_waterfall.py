"""Trace as text and as trace-event file, rows of requests, metrics as data."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_core.observe.frames import EdgeView, GraphView, RequestStatus
from mstar_core.observe.waits import with_waits
from mstarctl.commands.metrics import samples
from mstarctl.commands.requests import cut_rows, for_people, has_expression, item_of, order_of
from mstarctl.commands.trace import picture
from mstarctl.objects.parts import part_lines, request_lines
from mstarctl.output.moments import dated
from mstarctl.output.perfetto import trace_events
from mstarctl.output.table import cell_width
from mstarctl.output.waterfall import waterfall
from mstarctl.top.drawing.glyphs import ASCII, UNICODE, Glyphs

REQUEST = {
    "id": "r-7f3a",
    "handle": 4711,
    "model": "qwen3_omni",
    "inputs": ["audio", "text"],
    "outputs": ["text", "audio"],
    "state": "finished",
    "ended": 1.8,
    "age_s": 1.842,
    "ttft_ms": 231.0,
    "ttfa_ms": 402.0,
    "tokens": 312,
    "audio_s": 5.4,
    "rtf": 0.34,
    "error": "",
    "node": None,
}


def span(process: str, kind: str, node: str, walk: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    facts = {"process": process, "kind": kind, "node": node, "walk": walk, "start_ms": start, "end_ms": end}
    return {**facts, "count": 1, "batch": 0, "size_bytes": 0, "is_open": False, **more}


def total(*spans: dict[str, Any], **more: Any) -> dict[str, Any]:
    first = spans[0]
    return {
        **{key: first[key] for key in ("process", "kind", "node", "walk")},
        "start_ms": min(s["start_ms"] for s in spans),
        "end_ms": max(s["end_ms"] for s in spans),
        "busy_ms": sum(s["end_ms"] - s["start_ms"] for s in spans),
        "spans": len(spans),
        "count": sum(s["count"] for s in spans),
        "size_bytes": sum(s["size_bytes"] for s in spans),
        **more,
    }


PARSE = span("api", "compute", "parse", "", 0, 38)
QUEUE = span("worker-1", "queue", "thinker", "prefill", 91, 122)
PREFILL = span("worker-1", "compute", "thinker", "prefill", 122, 214, count=1, batch=3)
DECODE = span("worker-1", "compute", "thinker", "decode", 214, 1840, count=312, batch=14)
HIDDEN = span("worker-0", "transfer", "hidden", "", 280, 1830, count=312, size_bytes=2516582)
ALL = (PARSE, QUEUE, PREFILL, DECODE, HIDDEN)
TRACE = {"request": REQUEST, "spans": list(ALL), "sums": [total(span) for span in ALL], "spans_cut": 0}


def test_a_waterfall_has_a_head_and_a_row_a_place() -> None:
    head, *rows = waterfall(TRACE)
    assert head.split("   ") == [
        "r-7f3a",
        "qwen3_omni",
        "audio+text -> text+audio",
        "1842 ms",
        "TTFT 231",
        "TTFA 402",
        "312 tokens",
        "5.4 s audio (RTF 0.34)",
    ]
    assert [row.split()[0] for row in rows] == ["api", "rank", "thinker", "thinker", "rank"]
    assert "-" in rows[1] and "13 % of TTFT" in rows[1]
    assert "batch 3" in rows[2] and "312 steps, mean 5.2 ms" in rows[3]
    assert "edge hidden" in rows[4] and "2.4 MiB" in rows[4] and ":::" in rows[4]


def test_only_waiting_before_the_first_output_counts_for_it() -> None:
    """A node that waits for its input while another computes, or after the first output, delayed nothing."""
    waits = span("worker-0", "queue", "codec", "chunk", 100, 1800)
    beside = (*ALL[:1], waits, PREFILL, DECODE)
    trace = {**TRACE, "spans": list(beside), "sums": [total(span) for span in beside]}
    (row,) = (line for line in waterfall(trace) if "codec" in line)
    assert "10 % of TTFT" in row  # 100 to 122 of 231 ms


GRAPH = GraphView(
    edges=[
        EdgeView(name="ids", source="LLM", into="codec", is_stream=True),
        EdgeView(name="pcm", source="codec", modality="audio"),
    ]
)


def spoken(*ends: float, cut: int = 0) -> dict[str, Any]:
    """Return the trace of an answer whose codec ran for 10 ms until each of `ends`, and waited in between."""
    steps = [span("worker-0", "compute", "codec", "chunk", end - 10, end) for end in ends]
    before = [100.0, *ends]
    waits = [
        span("worker-0", "wait", "codec", "chunk", begin, step["start_ms"])
        for begin, step in zip(before, steps, strict=False)
        if step["start_ms"] > begin
    ]
    sums = [total(*steps, count=len(steps) + cut), total(*waits)]
    request = {**REQUEST, "ttft_ms": ends[0], "ttfa_ms": ends[0], "audio_s": 0.1 * (len(ends) + cut)}
    return {"request": request, "spans": [*steps, *waits], "sums": sums, "spans_cut": cut}


def test_a_codec_that_waits_in_time_is_not_a_stall() -> None:
    """Each chunk of 100 ms came every 50 ms: no listener heard a wait, however long the waits were in sum."""
    trace = spoken(200, 250, 300, 350)
    shown = with_waits(trace, trace["request"], GRAPH)
    assert {s["kind"] for s in (*shown["spans"], *shown["sums"])} == {"compute", "wait"}
    (row,) = (line for line in waterfall(with_waits(trace, trace["request"], GRAPH)) if "waits for LLM" in line)
    assert "_" in row and "~" not in row and "4 times" in row


def test_silence_during_playback_is_a_stall() -> None:
    """Playback of two chunks ends at 400 ms; the third came at 700 ms."""
    trace = spoken(200, 250, 700, 750)
    shown = with_waits(trace, trace["request"], GRAPH)
    (gap,) = (s for s in shown["spans"] if s["kind"] == "stall")
    assert (gap["start_ms"], gap["end_ms"]) == (400, 690)
    (row,) = (line for line in waterfall(with_waits(trace, trace["request"], GRAPH)) if "stall, heard" in line)
    assert "~" in row and "290 ms" in row
    waited = sum(s["end_ms"] - s["start_ms"] for s in shown["spans"] if s["kind"] == "wait")
    assert waited == pytest.approx(90 + 40 + 150 + 40)


def test_dropped_spans_count_as_audio_in_time() -> None:
    trace = spoken(200, 700, 750, cut=5)  # 500 ms of earlier audio are still played at 700 ms
    assert "stall" not in {s["kind"] for s in with_waits(trace, trace["request"], GRAPH)["spans"]}


def test_without_a_graph_a_wait_has_no_name() -> None:
    assert any("codec waits for input" in line for line in waterfall(spoken(200, 700)))


@pytest.mark.parametrize("width", [40, 80, 120, 300])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_a_trace_fits_the_terminal(width: int, glyphs: Glyphs) -> None:
    error = "the model ended before its first window, so that the answer contains no audio"
    trace = {**spoken(200, 250, 700), "spans_cut": 3}
    trace["request"] |= {"route": "/generate", "started": 0.0, "placed": "rank 0", "error": error, "state": "failed"}
    rows = picture(trace, GRAPH, width, glyphs)
    assert {row.width for row in rows if row.width > width} == set()
    text = "\n".join(row.plain for row in rows)
    assert error in " ".join(text.split()) and "3 early spans" in text
    assert "TTFT 200 ms" in text and "0 ms" in text
    roles = {role for row in rows for _, role in row.spans}
    assert {"compute", "wait", "accent"} <= roles


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_bars_start_and_end_where_their_spans_do(width: int) -> None:
    _, parse, _, _, decode, _ = waterfall(TRACE, width)
    bars = [next(word for word in row.split() if set(word) <= set(".#") and len(word) > 5) for row in (parse, decode)]
    assert len({len(bar) for bar in bars}) == 1 and len(bars[0]) <= 48
    assert bars[0][0] == "#" and bars[0][-1] == "." and bars[1][0] == "." and bars[1][-1] == "#"
    if width >= 120:
        assert all(cell_width(row.split("  ")[0]) < width for row in (parse, decode))


def test_spans_that_were_dropped_are_drawn_from_their_sum() -> None:
    cut = {**TRACE, "spans": [DECODE | {"start_ms": 1800}], "sums": [total(DECODE, spans=9)], "spans_cut": 8}
    *_, row, note = waterfall(cut)
    assert row.count("#") > 20 and "8 early spans" in note


def test_what_goes_on_is_said_so_and_nothing_is_no_error() -> None:
    live = {**REQUEST, "ended": None, "state": "run", "node": "talker", "ttft_ms": None, "ttfa_ms": None}
    going = span("worker-0", "compute", "talker", "", 10, 900, is_open=True)
    head, row = waterfall({"request": live, "spans": [going], "sums": [], "spans_cut": 0})
    assert "still in talker" in head and "still running" in row
    assert waterfall({"request": live, "spans": [], "sums": [], "spans_cut": 0})[1].startswith("no spans")


def test_an_id_cannot_drive_the_terminal() -> None:
    head = waterfall({**TRACE, "request": {**REQUEST, "id": "a\x1b[2Jb"}})[0]
    assert "\x1b" not in head and "a\\x1b[2Jb" in head


def test_trace_events_keep_every_span_in_microseconds() -> None:
    actual = trace_events(TRACE)["traceEvents"]
    spans = [event for event in actual if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["cat"]) for e in spans[:2]] == [
        ("parse", 0.0, 38000.0, "compute"),
        ("thinker prefill", 91000.0, 31000.0, "queue"),
    ]
    names = {event["args"]["name"] for event in actual if event["name"] == "process_name"}
    assert names == {"api", "rank 1", "rank 0"}
    tracks = {(event["pid"], event["tid"]) for event in actual if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} == tracks


def request(handle: int, **facts: Any) -> dict[str, Any]:
    return item_of(RequestStatus(id=f"r-{handle}", handle=handle, started=10.0, **facts), 20.0)


def test_rows_are_sorted_with_the_unknown_last_and_cut() -> None:
    items = [request(1, ttft_ms=5.0), request(2), request(3, ttft_ms=9.0), request(4, ttft_ms=7.0)]
    falling, cut = cut_rows(items, order_of("ttft"), 3, 0)
    assert ([item["handle"] for item in falling], cut) == ([3, 4, 1], 1)
    rising, cut = cut_rows(items, order_of("-ttft"), 9, 4)
    assert ([item["handle"] for item in rising], cut) == ([1, 4, 3, 2], 4)


def test_a_row_shows_where_it_is_and_why_it_waits() -> None:
    waiting = for_people(request(1, state="queue", why="rank 1 busy", inputs=["text"], outputs=["audio"]))
    assert (waiting["at"], waiting["way"], waiting["note"]) == ("queue", "text → audio", "rank 1 busy")
    running = for_people(request(2, state="run", node="talker", walks={"prefill": 1, "decode": 3}, active=["talk"]))
    assert (running["at"], running["walks_text"]) == ("talker", "✓prefill ✓decode x3 ▶talk")
    assert for_people(request(3, state="failed", ended=12.0, error="timeout"))["note"] == "timeout"


@pytest.mark.parametrize(("text", "expected"), [("/a/", True), ("!/a/ b", True), ("id:/a", False), ("//", False)])
def test_expressions_are_seen_before_a_server_refuses_them(text: str, expected: bool) -> None:
    assert has_expression(text) is expected


def test_metrics_are_read_with_their_labels() -> None:
    text = '# HELP x y\n# TYPE x counter\nx_total 3.0\ny{a="1",b="q\\"\\\\n"} 0.5 1700000000\nz NaN\nnot a sample\n'
    assert list(samples(text)) == [
        {"name": "x_total", "labels": {}, "value": 3.0},
        {"name": "y", "labels": {"a": "1", "b": 'q"\\n'}, "value": 0.5},
        {"name": "z", "labels": {}, "value": None},
    ]


def test_the_choice_of_replicas_is_below_the_head() -> None:
    placed = "rank 1: has read 96 of 128 ids of the prompt, 2 open, at least 1 elsewhere"
    trace = {"request": {**REQUEST, "placed": placed}, "spans": [], "sums": [], "spans_cut": 0}
    assert waterfall(trace, 120)[1] == f"placed on {placed}"


def test_a_described_request_has_times_of_day_and_no_numbers_of_programs() -> None:
    item = {
        "name": "r-7f3a",
        "deployment": "one",
        "id": "r-7f3a",
        "handle": 1099511627777,
        "state": "run",
        "started": 36728.2,
        "ended": None,
        "tokens": 3,
        "steps": 0,
        "audio_s": 1.5,
    }
    lines = list(request_lines(dated(item, 1_795_000_000.0)))
    text = "\n".join(lines)
    assert "1099511627777" not in text and "None" not in text and "ended" not in text and "36728" not in text
    (started,) = (line.split()[1] for line in lines if "started" in line)
    assert started.count(":") == 2 and len(started) == 8


def test_a_described_part_names_each_unit_once() -> None:
    item = {
        "name": "r",
        "deployment": "one",
        "ttft_ms": 342.242,
        "age_s": 1.5,
        "cache_bytes": 1 << 20,
        "tokens_s": 7.0,
        "edges": {"hidden": {"transfer_ms": 2.0, "bytes_s": 2048.0}},
    }
    text = "\n".join(part_lines("request r", item))
    assert "ttft             342.242 ms" in text and "tokens_s         7" in text
    assert "transfer 2 ms  bytes 2.0 KiB/s" in text
    for doubled in ("_ms", "_bytes", "age_s", "bytes_s"):
        assert doubled not in text
