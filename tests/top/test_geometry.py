"""Geometry of the graph: any graph with any rates stays inside its cells."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.observe.frames import EdgeStatus, EdgeView, GraphView, NodeView, WalkView
from mstarctl.client.store import Store
from mstarctl.top.data.view import View, size_of
from mstarctl.top.layout.graph.geometry import GraphLayout, Size, levels, place, wires
from mstarctl.top.layout.graph.screen import drawing, graph_page
from tests.top.models import qwen_graph

FEW = settings(max_examples=40, deadline=None)
NAMES = ("encoder", "LLM", "talker", "codec", "flow", "head", "vae")


@st.composite
def graphs(draw: st.DrawFn) -> GraphView:
    """Draw up to seven nodes in up to three partitions, with edges between any two and the client."""
    names = NAMES[: draw(st.integers(1, 7))]
    parts = [f"P{draw(st.integers(0, 2))}" for _ in names]
    ends = st.sampled_from([*names, ""])
    edges = [
        EdgeView(
            name=f"e{n}",
            source=source,
            into=into,
            modality="text" if not (source and into) else "",
            is_stream=draw(st.booleans()),
            walks=["a"],
        )
        for n, (source, into) in enumerate(draw(st.lists(st.tuples(ends, ends), max_size=10)))
        if source or into
    ]
    nodes = [NodeView(name=n, partition=p, replicas=[[0]], walks=["a"]) for n, p in zip(names, parts, strict=True)]
    return GraphView(
        model="m",
        partitions=sorted(set(parts)),
        nodes=nodes,
        edges=edges,
        walks=[WalkView(name="a", nodes=list(names))],
    )


def placed(graph: GraphView) -> tuple[GraphLayout, dict[str, Size]]:
    routes = wires(graph, ())
    ends = {end for wire in routes for end in (wire.source, wire.into)} | {node.name for node in graph.nodes}
    sizes = {end: Size(width=12, height=4 if end in NAMES else 1, port=len(end)) for end in ends}
    return place(graph, routes, sizes), sizes


@FEW
@given(graphs())
def test_boxes_are_inside_the_drawing_and_do_not_overlap(graph: GraphView) -> None:
    actual, sizes = placed(graph)
    areas = {key: (at.x, at.y, at.x + sizes[key].width, at.y + sizes[key].height) for key, at in actual.boxes.items()}
    assert set(areas) == set(sizes)
    assert all(x0 >= 0 and y0 >= 0 and x1 <= actual.width and y1 <= actual.height for x0, y0, x1, y1 in areas.values())
    for (_, a), (_, b) in combinations(areas.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@FEW
@given(graphs())
def test_frames_contain_the_nodes_of_their_partition_only(graph: GraphView) -> None:
    actual, sizes = placed(graph)
    for node in graph.nodes:
        at = actual.boxes[node.name]
        for frame in actual.frames:
            inside = frame.x < at.x and at.x + sizes[node.name].width < frame.x + frame.width
            inside = inside and frame.y < at.y and at.y + sizes[node.name].height < frame.y + frame.height
            assert inside == (frame.name == node.partition)


@FEW
@given(graphs())
def test_wires_run_straight_from_box_to_box(graph: GraphView) -> None:
    actual, _ = placed(graph)
    for route in actual.routes:
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(route.corners))
        assert route.corners[0][1] == actual.boxes[route.wire.source].y
        assert route.corners[-1] == (actual.boxes[route.wire.into].x - 2, actual.boxes[route.wire.into].y)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([(160, 50), (120, 30), (80, 20), (40, 10)]))
def test_any_graph_fits_its_screen(graph: GraphView, cells: tuple[int, int]) -> None:
    width, height = cells
    view = View(store=Store(graph=graph, is_synced=True))
    rows = graph_page(view, width, height, size_of(width, height + 4))
    assert [row.width for row in rows] == [width] * height


def test_levels_count_the_longest_path_without_cycles() -> None:
    assert levels("abcd", [("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")]) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert levels("ab", [("a", "b"), ("b", "a")]) == {"a": 0, "b": 1}


def test_a_walk_dims_what_it_does_not_visit() -> None:
    view = View(store=Store(graph=qwen_graph(), is_synced=True))
    rows = drawing(view, view.store.graph, "code2wav_chunk", "", 120, 30)
    assert rows is not None
    roles = {span.text.strip(): span.role for row in rows for span in row.spans}
    assert roles["Talker"].endswith("+off")
    assert not next(role for text, role in roles.items() if text == "Code2Wav" and role.startswith("node")).endswith(
        "+off"
    )


def test_if_the_graph_is_too_large_the_highlighted_walk_is_drawn_alone() -> None:
    names = [f"node_{number}" for number in range(20)]
    nodes = [NodeView(name=name, partition="P", walks=["all", *["two"] * (name in names[3:5])]) for name in names]
    edges = [
        EdgeView(name="x", source=a, into=b, walks=["all", *["two"] * (a == names[3])]) for a, b in pairwise(names)
    ]
    view = View(store=Store(graph=GraphView(partitions=["P"], nodes=nodes, edges=edges), is_synced=True))
    assert drawing(view, view.store.graph, "", "", 100, 20) is None
    rows = drawing(view, view.store.graph, "two", "", 100, 20)
    assert rows is not None
    text = "\n".join(row.plain for row in rows)
    assert [name for name in names if f"{name} " in text] == names[3:5] and view.glyphs.arrow_right in text
    assert drawing(view, view.store.graph, "all", "", 100, 20) is None


def test_parallel_edges_are_one_wire_with_the_sum_of_their_rates() -> None:
    ends = {"source": "a", "into": "b"}
    edges = [EdgeView(name="x", **ends), EdgeView(name="y", **ends)]
    graph = GraphView(nodes=[NodeView(name="a"), NodeView(name="b")], edges=edges)
    live = [
        EdgeStatus(name="x", items_s=3.0, bytes_s=10.0, **ends),
        EdgeStatus(name="y", items_s=4.0, bytes_s=1.0, **ends),
    ]
    (wire,) = wires(graph, live)
    assert (wire.names, wire.items_s, wire.bytes_s) == (("x", "y"), 7.0, 11.0)
