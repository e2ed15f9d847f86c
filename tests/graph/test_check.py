"""Every contradiction of a graph is reported with its place and the nearest name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from mstar_core.graph import (
    CHUNK_FIRST,
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    Attend,
    EngineHints,
    FixedChunk,
    KVSpec,
    LeftContext,
    Loop,
    NodeSpec,
    Parallel,
    Sequential,
    SlidingWindow,
    StopOn,
    StopWhen,
    Stream,
    Walk,
    check_graph,
    from_param,
)
from mstar_core.graph import GraphEdge as E
from mstar_core.graph import GraphNode as N
from mstar_core.graph import StreamingGraphEdge as S
from tests.graph.families import kv_node, plain

OUT = E("y", CLIENT, modality="tensor")
A = plain("alpha", x="f32[n]", y="f32[n]", flag="b8")
B = plain("beta", x="f32[n]", y="f32[n]", ids="i64[n]")
LLM = kv_node("LLM", {"token": "i64[1]", "x": "f32[n]", "y": "f32[n]"})


def problems(
    walk: Walk | Mapping[str, Walk], *nodes: NodeSpec, streams: tuple[Stream, ...] = (), params: tuple[str, ...] = ()
) -> list[str]:
    walks = walk if isinstance(walk, Mapping) else {"go": walk}
    errors = check_graph(nodes, streams, {"main": walks}, params)
    return [f"{error}  @{error.facts['place']}" for error in errors]


def test_a_sound_graph_has_none() -> None:
    assert problems(Sequential(N(A, ("x",), (E("y", B, into="x"),)), N(B, ("x",), (OUT,))), A, B) == []


CASES: dict[str, tuple[Walk, tuple[NodeSpec, ...], str]] = {
    "unknown node": (
        N(plain("alpah", x="f32[n]", y="f32[n]"), ("x",), (OUT,)),
        (A,),
        "walk 'go' names node 'alpah'; did you mean 'alpha'?  @go.alpah",
    ),
    "another spec of the name": (
        N(replace(A, doc="other"), ("x",), (OUT,)),
        (A,),
        "walk 'go' uses a node 'alpha' that differs from the one declared; refer to the NodeSpec object of "
        "nodes=  @go.alpha",
    ),
    "unknown input": (
        N(A, ("xx",), (OUT,)),
        (A,),
        "walk 'go' takes port 'xx', which node 'alpha' does not have; did you mean 'x'?  @go.alpha",
    ),
    "unknown output": (
        N(B, ("x",), (E("idz", CLIENT, modality="text"),)),
        (B,),
        "walk 'go' sends port 'idz', which node 'beta' does not have; did you mean 'ids'?  @go.beta",
    ),
    "edge to a port that is not there": (
        Sequential(N(A, ("x",), (E("y", B, into="idz"),)), N(B, ("ids",), (OUT,))),
        (A, B),
        "walk 'go' sends port 'y' of 'alpha' into port 'idz', which node 'beta' does not have; did you mean 'ids'?"
        "  @go.beta",
    ),
    "edge to a port that the use does not take": (
        Sequential(N(A, ("x",), (E("y", B),)), N(B, ("x",), (OUT,))),
        (A, B),
        "walk 'go' sends port 'y' of 'alpha' to 'beta', which takes no input 'y'; choose one of: x  @go.alpha.y",
    ),
    "edge to a node that the walk does not use": (
        N(A, ("x",), (E("y", B, into="x"), OUT)),
        (A, B),
        "walk 'go' names node 'beta' in an edge of 'alpha', which the walk does not use; choose one of: "
        "alpha  @go.alpha.y",
    ),
    "edge to a text": (
        N(A, ("x",), (E("y", "beta"), OUT)),
        (A,),
        "walk 'go' sends port 'y' of 'alpha' to the text 'beta'; refer to a node by its NodeSpec object, or to CLIENT"
        "  @go.alpha",
    ),
    "edge out of a loop": (
        Sequential(Loop("again", N(A, ("x",), (E("y", B, into="x"),))), N(B, ("x",), (OUT,))),
        (A, B),
        "walk 'go' sends port 'y' of 'alpha' out of its loop to 'beta'; write the edge in the loop's "
        "outputs=, which hands "
        "over the last iteration's value  @go.alpha.y",
    ),
    "port fed twice": (
        Sequential(
            Parallel(N(A, ("x",), (E("y", B, into="x"),)), N(LLM, ("x",), (E("y", B, into="x"),))), N(B, ("x",), (OUT,))
        ),
        (A, B, LLM),
        "walk 'go' feeds port 'x' of 'beta' twice; join the values in a node, or rename one of them with into=  @LLM",
    ),
    "wrong type": (
        Sequential(N(A, ("x",), (E("y", B, into="ids"),)), N(B, ("ids",), (OUT,))),
        (A, B),
        "walk 'go' sends alpha.y (f32[n]) into beta.ids (i64[n]); make the types agree  @go.beta",
    ),
    "wrong carried type": (
        Loop("again", N(B, ("x",), (E("ids", CLIENT, modality="text"),)), carry={"ids": "x"}),
        (B,),
        "walk 'go' sends beta.ids (i64[n]) into beta.x (f32[n]); make the types agree  @go.beta",
    ),
    "no modality": (
        N(A, ("x",), (E("y", CLIENT),)),
        (A,),
        "walk 'go' emits port 'y' of 'alpha' without a modality; write modality=\"text\" or another output "
        "modality of the "
        "model  @go.alpha",
    ),
    "reaches nothing": (
        N(A, ("x",)),
        (A,),
        "walk 'go' reaches no output, no stream and no cache; add an edge to CLIENT or to a stream, or let a "
        "node with a "
        "cache write to it  @go.outputs",
    ),
    "reads a cache only": (
        N(LLM, ("x",), attend=Attend(write=False)),
        (LLM,),
        "walk 'go' reaches no output, no stream and no cache; add an edge to CLIENT or to a stream, or let a "
        "node with a "
        "cache write to it  @go.outputs",
    ),
    "node in no walk": (
        N(A, ("x",), (OUT,)),
        (A, B),
        "node 'beta' is in no walk; use it in a walk or leave it out  @beta",
    ),
    "cycle": (
        Sequential(N(A, ("x",), (E("y", B, into="x"),)), N(B, ("x",), (E("y", A, into="x"), OUT))),
        (A, B),
        "walk 'go' has a cycle: alpha and beta wait for each other; carry a value to the next iteration "
        "with a Loop's "
        "carry=  @alpha",
    ),
    "two loops of one name": (
        Sequential(Loop("again", N(A, ("x",), (OUT,))), Loop("again", N(B, ("x",), (OUT,)))),
        (A, B),
        "walk 'go' has two loops called 'again'; give each loop its own name  @again",
    ),
    "carry from nowhere": (
        Loop("again", N(A, ("x",), (OUT,)), carry={"yy": "x"}),
        (A,),
        "walk 'go' loop 'again' carries port 'yy', which no node of its body has; did you mean 'y'?  @again",
    ),
    "carry to nowhere": (
        Loop("again", N(A, ("x",), (OUT,)), carry={"y": "z"}),
        (A,),
        "walk 'go' loop 'again' carries into port 'z', which no node of its body takes; choose one of: x  @again",
    ),
    "fused loop of two nodes": (
        Loop("again", Sequential(N(A, ("x",), (E("y", B, into="x"),)), N(B, ("x",), (OUT,))), fused=True),
        (A, B),
        "walk 'go' has a fused loop 'again', whose body has several nodes; the engine iterates loops of one node "
        "without a stream: leave fused= out, or join the nodes  @again",
    ),
    "outputs without a producer": (
        Loop("again", N(A, ("x",)), outputs=(E("latents", CLIENT, modality="tensor"),)),
        (A,),
        "walk 'go' loop 'again' hands out port 'latents', which no node of its body has; choose one of: "
        "flag, x, y  @again",
    ),
    "stop on a float": (
        Loop("again", N(A, ("x",), (OUT,)), stop=StopOn("y", (1,))),
        (A,),
        "walk 'go' stops loop 'again' on alpha.y, which is f32 and not ids; stop on another port  @go.again",
    ),
    "stop when a float": (
        Loop("again", N(A, ("x",), (OUT,)), stop=StopWhen("y")),
        (A,),
        "walk 'go' stops loop 'again' on alpha.y, which is f32 and not a b8; stop on another port  @go.again",
    ),
    "stop on nothing": (
        Loop("again", N(B, ("x",), (OUT,)), stop=StopOn("ids")),
        (B,),
        "walk 'go' stops loop 'again' on no id; name the ids, or leave stop= out  @go.again",
    ),
    "stop inside": (
        Loop("again", Loop("inner", N(A, ("x",), (OUT,))), stop=StopWhen("flag")),
        (A,),
        "walk 'go' loop 'again' stops on port 'flag' of a loop inside it; stop on a port of a node that "
        "stands directly in "
        "the body  @again",
    ),
    "unless of nothing": (
        Loop("again", N(B, ("x",), (OUT,)), stop=StopOn("ids", (1,), unless="ignore_eso")),
        (B,),
        "walk 'go', unless= of loop 'again' names parameter 'ignore_eso', which the model does not have; did you mean "
        "'ignore_eos'?  @go.again",
    ),
    "unknown parameter": (
        N(A, ("x", from_param("stepz")), (OUT,)),
        (A,),
        "walk 'go', node 'alpha' names parameter 'stepz', which the model does not have; did you mean "
        "'steps'?  @go.alpha",
    ),
    "step outside a loop": (
        N(A, ("x", STEP), (OUT,)),
        (A,),
        "walk 'go' gives $step to 'alpha' outside a loop; put the node into a Loop  @go.alpha",
    ),
    "chunk flag outside a stream": (
        Loop("again", N(A, ("x", CHUNK_FIRST), (OUT,))),
        (A,),
        "walk 'go' gives $first to 'alpha' outside a loop over a stream; put the node into a Loop(over=)  @go.alpha",
    ),
    "attend without a cache": (
        N(A, ("x",), (OUT,), attend=Attend()),
        (A,),
        "walk 'go' gives attend= to node 'alpha', which keeps no cache; leave attend= out  @go.alpha",
    ),
    "cache used twice in no order": (
        Parallel(N(LLM, ("x",)), N(LLM, ("token",), (OUT,))),
        (LLM,),
        "walk 'go' uses node 'LLM' twice with nothing that says which comes first; join the two uses by an "
        "edge, or write "
        "two walks  @go.LLM",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_walk_that_contradicts_itself_says_how(case: str) -> None:
    walk, nodes, expected = CASES[case]
    errors = problems(walk, *nodes, params=("ignore_eos", "steps"))
    assert [text for text in errors if text == expected or "is in no walk" not in text] == [expected]


def test_all_problems_are_told_not_only_the_first() -> None:
    errors = problems({"one": N(A, ("xx",), (OUT,)), "two": N(A, ("zz",), (OUT,))}, A, B)
    assert len(errors) == 3


NODES = {
    "no kv": (
        NodeSpec(name="n", engine=KV_CACHE, ports={"x": "f32", "y": "f32"}),
        "node 'n' keeps a cache but has no kv=KVSpec(...); give layers, kv_heads and head_dim  @n",
    ),
    "kv for nothing": (
        NodeSpec(
            name="n", engine=STATELESS, ports={"x": "f32", "y": "f32"}, kv=KVSpec(layers=1, kv_heads=1, head_dim=1)
        ),
        "node 'n' has a KVSpec but keeps no cache; make its engine KV_CACHE  @n",
    ),
    "unknown branch": (
        replace(kv_node("n", {"x": "f32", "y": "f32"}, ("main", "cfg_text")), branch="cfg_txt"),
        "node 'n' runs on cache branch 'cfg_txt', which its KVSpec does not name; did you mean 'cfg_text'?  @n",
    ),
    "samples nowhere": (
        kv_node("n", {"x": "f32", "y": "f32", "token": "i64"}, sampling="tokn"),
        "node 'n' samples into port 'tokn', which node 'n' does not have; did you mean 'token'?  @n",
    ),
    "steps of a port that is not of rows": (
        replace(kv_node("n", {"x": "f32", "y": "f32"}), row_ports=("x",), step_ports=("y",)),
        "step_ports of node 'n' name 'y', which is not among its row_ports; name it in both  @n",
    ),
    "hints for an engine that captures nothing by them": (
        replace(plain("n", x="f32", y="f32"), hints=EngineHints(capture_sizes=(1,))),
        "node 'n' has hints, which mean nothing to its engine; leave them out  @n",
    ),
    "batch key of nothing": (
        replace(plain("n", x="f32", y="f32"), batch_key=("z",)),
        "batch_key of node 'n' names port 'z', which node 'n' does not have; choose one of: x, y  @n",
    ),
}


@pytest.mark.parametrize("case", NODES, ids=str)
def test_a_node_that_contradicts_itself_says_how(case: str) -> None:
    node, expected = NODES[case]
    assert problems(N(node, ("x",), (OUT,)), node) == [expected]


def streamed(stream: Stream, consumer: Walk | None = None, produce: bool = True) -> list[str]:
    give = N(A, ("x",), (S("y", stream), OUT) if produce else (OUT,))
    take = consumer or Loop("chunks", N(B, ("x",), (OUT,)), over=stream)
    errors = check_graph([A, B], [stream], {"one": {"give": give}, "two": {"take": take}}, ("flush",))
    return [f"{error}  @{error.facts['place']}" for error in errors]


def test_a_sound_stream_has_no_problem() -> None:
    assert streamed(Stream("s", (B, "x"), FixedChunk(1), flush_if="flush")) == []


def test_a_stream_may_be_taken_by_a_node_without_a_loop() -> None:
    assert streamed(Stream("s", (B, "x"), FixedChunk(1)), consumer=N(B, ("x",), (OUT,))) == []


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (Stream("s", (B, "x"), FixedChunk(0)), "chunk policy of stream 's' has size=0; size is at least 1  @stream s"),
        (
            Stream("s", (B, "x"), SlidingWindow(4, 0)),
            "chunk policy of stream 's' has stride=0; stride is at least 1  @stream s",
        ),
        (
            Stream("s", (B, "x"), SlidingWindow(4, 1, first=5)),
            "chunk policy of stream 's' has first=5; the first chunk holds 1 to 4 items, the window's size  @stream s",
        ),
        (
            Stream("s", (B, "x"), SlidingWindow(4, 1, first_from="flsh")),
            "chunk policy of stream 's' names parameter 'flsh', which the model does not have; did you mean 'flush'?"
            "  @stream s",
        ),
        (
            Stream("s", (B, "x"), LeftContext(4, -1)),
            "chunk policy of stream 's' has left=-1; left is at least 0  @stream s",
        ),
        (
            Stream("s", (B, "x"), FixedChunk(1), flush_if="flsh"),
            "flush_if of stream 's' names parameter 'flsh', which the model does not have; did you mean 'flush'? "
            " @stream s",
        ),
        (
            Stream("s", (B, "x"), LeftContext(4, 1, chunk_from="flsh")),
            "chunk policy of stream 's' names parameter 'flsh', which the model does not have; did you mean 'flush'?"
            "  @stream s",
        ),
    ],
)
def test_a_stream_that_contradicts_itself_says_how(stream: Stream, expected: str) -> None:
    assert streamed(stream) == [expected]


def test_a_stream_needs_a_producer_a_consumer_and_two_partitions() -> None:
    stream = Stream("s", (B, "x"), FixedChunk(1))
    assert streamed(stream, produce=False) == [
        "stream 's' has no producer; exactly one partition puts values on a stream  @stream s"
    ]
    assert streamed(stream, consumer=N(B, ("ids",), (OUT,))) == [
        "stream 's' has no consumer; take beta.x in a walk, in a Loop(over=) of this stream or by itself  @stream s"
    ]
    inside = Sequential(N(A, ("x",), (S("y", stream),)), N(B, ("x",), (OUT,)))
    assert problems(inside, A, B, streams=(stream,)) == [
        "stream 's' stays inside partition 'main'; use a GraphEdge, or put the consumer into a partition of its own"
        "  @stream s"
    ]


def test_a_stream_that_is_not_declared_is_named() -> None:
    stream = Stream("ids", (B, "x"), FixedChunk(1))
    assert problems(N(A, ("x",), (S("y", replace(stream, name="idz")), OUT)), A, streams=()) == [
        "walk 'go' puts port 'y' of 'alpha' on stream 'idz', which is not among the streams; "
        "no choices exist  @go.alpha"
    ]


def test_a_loop_over_a_stream_takes_its_port() -> None:
    stream = Stream("s", (B, "x"), FixedChunk(1))
    assert (
        "walk 'take' loop 'chunks' runs over a stream into beta.x, which its body does not take; add 'beta' "
        "with input 'x' "
        "to the body  @chunks"
    ) in streamed(stream, consumer=Loop("chunks", N(B, ("ids",), (OUT,)), over=stream))


def test_a_walk_may_end_with_a_value_that_another_walk_starts_from() -> None:
    assert (
        problems({"draw": N(A, ("x",)), "go": N(B, ("y",), (OUT,))}, A, replace(B, ports={**B.ports, "y": "f32[n]"}))
        == []
    )
    errors = problems({"draw": N(A, ("x",)), "go": N(B, ("x",), (OUT,))}, A, B)
    assert len(errors) == 1 and errors[0].startswith("walk 'draw' reaches no output")
