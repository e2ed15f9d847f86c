"""Dead processes, tensor-parallel groups and failures on the screens."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC

import msgspec
import pytest

from mstar_core.observe.frames import DeploymentStatus, EdgeStatus, Event, HostStatus, NodeStatus, NodeView, RankStatus
from mstarctl.output.line import Line
from mstarctl.top.data.lost import without_lost
from mstarctl.top.data.view import Link, View
from mstarctl.top.keys import KEYS
from mstarctl.top.layout import events
from mstarctl.top.layout.dialogs import help_rows
from mstarctl.top.layout.graph.screen import box, node_table
from mstarctl.top.layout.header import failure_line, header
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.ranks import between, block
from mstarctl.top.layout.state import State
from tests.top.pictures import view_of

CAUSE = {"time": 60.0, "kind": "ProcessDied", "message": "worker-1 was killed by SIGKILL", "log": "/logs/worker-1.log"}


def with_dead_rank(state: str = "ended") -> View:
    """Return the view of two ranks of which the second has just died, with its last figures."""
    view = view_of("qwen3_omni")
    store = view.store.copy()
    store.ranks["1"] = msgspec.structs.replace(store.ranks["1"], state=state, core=0.94, memory_used=2**30, busy=0.8)
    return replace(view, store=store)


def plain(lines: list[Line]) -> str:
    return "\n".join(row.plain for row in lines)


def test_a_dead_rank_shows_no_figure_of_its_process() -> None:
    """The link into it has moving dots and a rate before."""
    view = with_dead_rank()
    assert any(edge.items_s for edge in view.store.edges.values() if edge.into_rank == 1)
    quiet = without_lost(view)
    rank = quiet.store.ranks["1"]
    assert (rank.busy, rank.core, rank.memory_used, rank.resident_bytes, rank.steps_s) == (0.0, None, None, None, 0.0)
    assert not any(edge.items_s or edge.bytes_s for edge in quiet.store.edges.values() if edge.into_rank == 1)
    assert all(node.busy == 0 and node.step_ms is None for node in quiet.store.nodes.values() if node.rank == 1)
    assert quiet.store.ranks["0"] == view.store.ranks["0"] and view.store.ranks["1"].core == 0.94


def test_a_dead_rank_is_grey_on_every_size_and_its_link_has_no_dots() -> None:
    view = with_dead_rank()
    for width, height in ((160, 45), (120, 34), (80, 24), (40, 12)):
        lines = compose(view, State(), width, height).lines
        text = plain(lines[1:])
        assert "94 %" not in text and view.glyphs.dot not in text, (width, height)
        assert any(span.role.endswith("+off") for row in lines for span in row.spans)
    assert "ended" in plain(block(without_lost(view), without_lost(view).store.ranks["1"], 120))


def test_a_rank_that_starts_again_keeps_its_memory_and_has_no_rates() -> None:
    quiet = without_lost(with_dead_rank("spawned"))
    assert quiet.store.ranks["1"].memory_used == 2**30
    assert not any(edge.items_s for edge in quiet.store.edges.values() if edge.into_rank == 1)


def test_without_dead_ranks_the_view_is_the_same() -> None:
    view = view_of("qwen3_omni")
    assert without_lost(view) is view


# -- tensor-parallel groups ---------------------------------------------------------------------------------------


def parallel(size: int) -> View:
    view = view_of("orpheus")
    store = view.store.copy()
    store.ranks = {"0": RankStatus(rank=0, state="ready", nodes=["LLM", "snac_decoder"], group=[*range(size)])}
    for rank in range(1, size):
        store.ranks[str(rank)] = RankStatus(rank=rank, state="ready", follows=["LLM"], group=[*range(size)], busy=0.4)
    store.nodes = {"LLM@0": NodeStatus(name="LLM", rank=0), "snac_decoder@0": NodeStatus(name="snac_decoder", rank=0)}
    return replace(view, store=store)


@pytest.mark.parametrize(("size", "shown", "short"), [(2, "rank 0+1 TP2", "0+1"), (8, "rank 0-7 TP8", "0-7")])
def test_a_parallel_node_is_on_all_ranks_of_its_group(size: int, shown: str, short: str) -> None:
    view = parallel(size)
    assert shown in plain(box(view, NodeView(name="LLM"), ""))
    assert "rank 0" in plain(box(view, NodeView(name="snac_decoder"), "")).splitlines()
    (row,) = (r for r in plain(node_table(view, view.store.graph, "", 120)).splitlines() if r.startswith(" LLM"))
    assert row.split()[1] == short


# -- links --------------------------------------------------------------------------------------------------------


def test_four_links_between_two_ranks_are_all_drawn_with_their_ends() -> None:
    view = parallel(2)
    view.store.edges = {
        str(n): EdgeStatus(name=f"e{n}", source="LLM", into="" if n == 3 else "codec", source_rank=0, into_rank=1)
        for n in range(4)
    }
    (rows,) = between(view, ["0", "1"], 150)
    text = plain(rows)
    assert len(rows) == 2 and all(f"e{n}" in text for n in range(4))
    assert text.count("codec") == 3 and text.rstrip().endswith("rank 1")


# -- failures -----------------------------------------------------------------------------------------------------


def failed(state: str = "degraded", **facts: object) -> View:
    view = view_of("orpheus")
    store = view.store.copy()
    store.deployment = DeploymentStatus(name="orpheus", state=state, **facts)  # type: ignore[arg-type]  # named fields
    return replace(view, store=store, zone=UTC)


def test_a_failure_has_its_time_its_log_and_can_be_dismissed() -> None:
    view = failed(cause=CAUSE)
    row = failure_line(view, 140)
    assert row is not None and "00:01:00 ProcessDied: worker-1 was killed by SIGKILL" in row.plain
    assert "log /logs/worker-1.log" in row.plain and "X dismisses" in row.plain
    assert failure_line(view, 140, dismissed=60.0) is None
    later = failed(cause={**CAUSE, "time": 90.0})
    assert failure_line(later, 140, dismissed=60.0) is not None, "a new failure is shown again"


def test_a_failure_that_is_over_is_a_time_in_the_second_line() -> None:
    view = failed("ready", last_failure=CAUSE)
    assert failure_line(view, 140) is None
    assert "last failure 00:01:00" in plain(header(view, 140, 2))
    assert "last failure" not in plain(header(view, 140, 2, dismissed=60.0))


def test_a_deployment_that_was_stopped_on_purpose_has_no_failure() -> None:
    view = replace(failed(cause=CAUSE), link=Link(state="ended", why="stopped: by mstarctl down"))
    assert failure_line(view, 140) is None


def test_a_death_stays_first_in_the_line_of_events_until_it_is_dismissed() -> None:
    view = view_of("orpheus")
    store = view.store.copy()
    store.events.clear()
    store.events.append(Event(n=1, type="child.died", time=60.0, facts={"child": "worker-1"}))
    store.events.extend(Event(n=n, type="request.refused", time=60.0 + n) for n in range(2, 9))
    store.events.append(Event(n=9, type="bench.progress", time=70.0, facts={"recording": "19ba"}))
    view = replace(view, store=store, zone=UTC)
    shown = events.last(view, 140).plain
    assert shown.split()[:3] == ["00:01:00", "child.died", "worker-1"] and "bench.progress" not in shown
    assert "child.died" not in events.last(view, 140, dismissed=60.0).plain


def test_the_help_has_the_glossary() -> None:
    text = plain(help_rows(KEYS, 100))
    for word in ("compute", "stall", "WAIT", "TICK"):
        assert any(row.split()[:1] == [word] for row in text.splitlines()), word


def test_a_graph_is_drawn_at_80_columns_where_it_fits_with_small_boxes_if_they_do() -> None:
    """Qwen3-Omni is wider than 80 cells in any form; its walk of decoding is not."""
    assert "╔═ SNAC" in plain(compose(view_of("orpheus"), State(page="graph"), 80, 24).lines)
    assert "╔═" not in plain(compose(view_of("qwen3_omni"), State(page="graph"), 80, 24).lines)
    alone = plain(compose(view_of("qwen3_omni"), State(page="graph", walk="thinker_decode"), 80, 24).lines)
    assert "╔═ Thinker" in alone
    small = plain(compose(view_of("qwen3_omni"), State(page="graph"), 96, 24).lines)
    assert "╔═ Talker" in small and "r1 " in small


# -- the host -----------------------------------------------------------------------------------------------------


def test_the_ranks_screen_shows_the_host_and_what_limits_a_gpu() -> None:
    """Processes of the deployment are not listed among those of others."""
    view = view_of("qwen3_omni")
    store = view.store.copy()
    cores = [0.9, 0.1] * 8
    store.hosts = {
        "local": HostStatus(
            cores=cores,
            memory_used=2**30,
            memory_total=2**34,
            swap_used=2**29,
            swap_total=2**30,
            net_in_s=2**20,
            disk_write_s=2**21,
        )
    }
    pid = str(store.ranks["0"].pid)
    store.gpus = {
        key: msgspec.structs.replace(
            gpu,
            pcie_in_s=2**30,
            pcie_out_s=0,
            fan=0.4,
            throttle=["power limit"],
            ecc_errors=1,
            processes={pid: ("python3", 2**33), "77": ("train.py", 2**31)},
        )
        for key, gpu in store.gpus.items()
    }
    text = plain(compose(replace(view, store=store), State(page="ranks"), 160, 45).lines)
    assert "50 % of 16" in text and "swap 0.5/1.0 GiB" in text and "network in 1.0 MiB/s" in text
    assert "PCIe in 1.0 GiB/s" in text and "fan 40 %" in text and "clock lowered by power limit" in text
    assert "ECC errors 1" in text and "others train.py 2.0 GiB" in text and "python3" not in text
