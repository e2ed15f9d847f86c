"""Hosts around their ranks: frames, lists, edges between hosts, lost hosts, keys and filters."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from mstar_core.observe.frames import Event, HostStatus, RankStatus
from mstarctl.client.store import Store
from mstarctl.output.theme import sgr
from mstarctl.top import navigation
from mstarctl.top.data.logs import Logged
from mstarctl.top.data.view import NORMAL, SMALL, View
from mstarctl.top.drawing.glyphs import ASCII, UNICODE, Glyphs
from mstarctl.top.layout.events import matching_events
from mstarctl.top.layout.hosts.frames import blocks
from mstarctl.top.layout.logs import matching_lines
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.state import State
from tests.top.models import qwen
from tests.top.pictures import EVERY_PAGE, HINTS, SIZES, check, painted, text_of, view_after, view_of
from tests.top.streams import Simulation

ODD_SIZES = ((40, 12), (59, 40), (60, 18), (100, 30), (159, 31), (200, 60))


def lost_view(state: str = "lost", reason: str = "silent for 10 s") -> View:
    """Return the view of two hosts after the second one was lost."""
    simulation = Simulation(qwen(), hz=1.0, hosts={1: "node-b"})
    frames = simulation.hello()
    simulation.host_states = {"node-b": (state, reason)}
    return view_after([*frames, *simulation.step()])


def many(hosts: int, ranks: int) -> View:
    """Return a view of some hosts with ranks of one GPU each."""
    store = Store(is_synced=True)
    store.hosts = {f"node-{n}" if n else "local": HostStatus(state="ready") for n in range(hosts)}
    for n in range(ranks):
        host = n % hosts
        store.ranks[str(n)] = RankStatus(rank=n, host=f"node-{host}" if host else "", device="cuda:0", state="ready")
    return View(store=store)


@pytest.mark.parametrize("page", ["overview", "graph", "ranks"])
def test_two_hosts_match_their_snapshots(page: str) -> None:
    check(f"{page}-hosts", "\n".join(text_of(painted(page, *size, name="hosts").lines) for size in SIZES))


def test_a_lost_host_matches_its_snapshot() -> None:
    text = "\n".join(text_of(compose(lost_view(), State(), *size, HINTS).lines) for size in SIZES)
    check("overview-hosts-lost", text)


@pytest.mark.parametrize("size", ODD_SIZES, ids=str)
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("page", EVERY_PAGE)
def test_every_line_fills_the_screen(page: str, glyphs: Glyphs, size: tuple[int, int]) -> None:
    for view in (replace(view_of("hosts"), glyphs=glyphs), replace(lost_view(), glyphs=glyphs)):
        lines = compose(view, State(page=page, rank="1"), *size, HINTS).lines
        assert [row.width for row in lines] == [size[0]] * size[1]
        if glyphs.is_ascii:
            assert text_of(lines).isascii()


@pytest.mark.parametrize("mode", ["true", "ansi", "mono"])
def test_every_role_has_a_style(mode: str) -> None:
    for row in compose(lost_view(), State(), 120, 34, HINTS).lines:
        sgr(row, mode)  # type: ignore[arg-type]  # one of the three


def test_a_deployment_of_one_host_has_no_frames() -> None:
    """Also in recordings of earlier versions, whose host has loads alone."""
    view = view_of("qwen3_omni")
    store = view.store.copy()
    store.hosts = {"local": HostStatus(cores=[0.5], memory_used=1, memory_total=2)}
    with_host = replace(view, store=store)
    assert blocks(with_host, 120, 30, NORMAL) == blocks(view, 120, 30, NORMAL)
    assert view_of("lost").hosts == with_host.hosts == []


def test_ranks_are_inside_the_frame_of_their_host() -> None:
    """Ranks 0 and 2 run on the supervisor's host, 1 and 3 on the other."""
    rows = [row.plain for row in blocks(many(2, 4), 120, 40, NORMAL)]
    marks = ("local", "rank 0", "rank 2", "node-1", "rank 1", "rank 3")
    assert [next(mark for mark in marks if mark in row) for row in rows if any(m in row for m in marks)] == list(marks)


def test_many_hosts_become_lines_and_then_names() -> None:
    view = many(4, 8)
    lines = [row.plain for row in blocks(view, 120, 14, NORMAL)]
    assert len(lines) <= 14 and sum("ready" in row for row in lines) == 4
    named = [row.plain for row in blocks(view, 80, 8, SMALL)]
    assert len(named) == 8 and sum("node-3" in row for row in named) == 2
    assert "more rank" in blocks(view, 80, 4, SMALL)[-2].plain + blocks(view, 80, 4, SMALL)[-1].plain


def test_a_host_without_ranks_is_shown() -> None:
    view = many(2, 1)
    text = text_of(blocks(view, 120, 30, NORMAL))
    assert "node-1" in text and "no rank runs here" in text


@pytest.mark.parametrize("size", [(120, 34), (80, 24)], ids=str)
def test_a_host_that_does_not_report_shows_its_cause_and_no_loads(size: tuple[int, int]) -> None:
    text = text_of(compose(lost_view("waiting", "waits for a host with 1 GPU"), State(), *size, HINTS).lines)
    row = next(row for row in text.splitlines() if "node-b" in row)
    assert "waiting" in row and "waits for a host with 1 GPU" in row and "48.0" not in row
    assert "hosts 1/2" in text
    rank = next(row for row in text.splitlines() if "ended" in row)
    assert UNICODE.full not in rank, "its GPU shows no load"


def test_edges_between_hosts_are_dashed() -> None:
    """The stream from Thinker to Talker joins the hosts; the one from Talker to Code2Wav stays on its host."""
    edge = next(row for row in painted("overview", 120, 34, name="hosts").lines if "thinker_states" in row.plain)
    assert UNICODE.dashed[10] in edge.plain and UNICODE.rule not in edge.plain
    graph = painted("graph", 120, 34, name="hosts").lines
    between, after = next(row.plain for row in graph if "[image]" in row.plain).split("Talker")
    assert "╌" in between and "╌" not in after
    assert "dashed = between hosts" in graph[2].plain
    one_host = painted("graph", 120, 34).lines
    assert "╌" not in text_of(one_host) and "dashed" not in text_of(one_host)


def test_n_goes_to_the_first_rank_of_the_next_host() -> None:
    view, state = many(3, 6), State(page="ranks")
    seen = []
    for _ in range(4):
        state = navigation.next_host(view, state)
        seen.append(state.rank)
    assert seen == ["0", "1", "2", "0"]
    assert navigation.next_host(view, State(page="ranks", rank="3")).rank == "1"
    assert navigation.next_host(view_of("qwen3_omni"), State()).rank is None


def test_rows_move_by_host() -> None:
    view = many(2, 4)
    assert navigation.move(view, State(page="ranks", rank="0"), 1).rank == "2"


def test_logs_and_events_are_found_by_host() -> None:
    view = view_of("hosts")
    logged = [Logged(source=name, message="text") for name in ("worker-0", "worker-1", "api")]
    assert [line.source for line in matching_lines(replace(view, logs=logged), "", "node-b")] == ["worker-1"]
    store = view.store.copy()
    store.events.clear()
    for number, (kind, facts) in enumerate((("host.lost", {"host": "node-b"}), ("child.died", {"child": "worker-1"}))):
        store.events.append(Event(n=number, type=kind, facts=facts))
    store.events.append(Event(n=9, type="child.died", facts={"child": "worker-0"}))
    assert [event.n for event in matching_events(replace(view, store=store), "node-b")] == [0, 1]


def test_processes_of_another_host_with_the_same_pid_are_not_ours() -> None:
    view = view_of("hosts")
    store = view.store.copy()
    gpu = store.gpus["node-b/0"]
    store.gpus["node-b/0"] = msgspec.structs.replace(gpu, processes={"4121": ("python", 2**30), "4122": ("me", 1)})
    text = text_of(compose(replace(view, store=store), State(page="ranks", rank="1"), 120, 34, HINTS).lines)
    assert "others python 1.0 GiB" in text
