"""Derivation of resident loops from walks: state, a stream, random numbers, and loops that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    RANDOM,
    STEP,
    Attend,
    EndWalk,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    LeftContext,
    Loop,
    LoopPorts,
    NodeSpec,
    Sampling,
    StopOn,
    Stream,
    StreamingGraphEdge,
    Walk,
    WalkState,
    Want,
    check_graph,
    compile_graph,
    compile_walk,
    cut,
    from_param,
    resident_ports,
)

WRITER = NodeSpec(
    name="writer",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
    sampling=Sampling(port="token"),
)
SPEAKER = NodeSpec(
    name="speaker",
    engine=KV_CACHE,
    ports={
        "tokens": "i64[n]?",
        "text": "i64[1]?",
        "code": "i64[1]",
        "state": "any[8]",
        "grows": "any[n]",
        "random": "f32[3]",
        "heat": "f32",
        "frame": "i64[4]",
        "loose": "any",
    },
    kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
    sampling=Sampling(port="code"),
)
TEXT = Stream("text", into=(SPEAKER, "text"), chunk=FixedChunk(1, after_end="empty"), reject=(2,))
INPUTS = ("code", "text", "state", RANDOM, from_param("heat"))
CARRY = {"code": "code", "state": "state"}
OUT = (GraphEdge("frame", CLIENT, modality="audio"),)
PORTS = LoopPorts(id_port="code", states=(("state", "state"),), constants=("$param:heat",), feed="text", random=True)


def speak(
    inputs: tuple[str, ...] = INPUTS, attend: Attend | None = None, node: NodeSpec = SPEAKER, **loop: Any
) -> Loop:
    fields: dict[str, Any] = {"carry": CARRY, "over": TEXT, "stop": StopOn("code", (1,)), **loop}
    return Loop("speak", GraphNode(node, inputs, OUT, attend=attend), **fields)


def resident(*walks: Walk) -> tuple[dict[str, LoopPorts], list[bool]]:
    compiled = compile_graph({str(number): walk for number, walk in enumerate(walks)}, [TEXT])
    engine = [loop.runs_in_engine for walk in compiled.values() for loop in walk.loops]
    return resident_ports(compiled.values()), engine


def test_a_loop_of_fixed_shapes_over_a_stream_of_ids_is_resident() -> None:
    assert resident(speak()) == ({"speaker": PORTS}, [True])
    assert resident(speak(attend=Attend(tokens=1))) == ({"speaker": PORTS}, [True])


def test_state_without_a_stream_is_resident_too() -> None:
    actual, engine = resident(speak(("code", "state", "frame"), over=None))
    assert (actual, engine) == ({"speaker": replace(PORTS, constants=("frame",), feed=None, random=False)}, [True])


@pytest.mark.parametrize(
    "loop",
    [
        speak(("code", "text", "grows"), carry={"code": "code", "grows": "grows"}),
        speak(("code", "text", "state", "loose")),
        speak(("code", "text", "state", STEP)),
        speak(("text", "state"), carry={"state": "state"}, stop=None),
        speak(attend=Attend(positions="shared")),
        speak(attend=Attend(keep="loop")),
        speak(over=replace(TEXT, chunk=FixedChunk(2))),
        speak(over=replace(TEXT, chunk=LeftContext(1, 0))),
    ],
    ids=["growing state", "no declared shape", "step", "no id", "positions", "kept for the loop", "pairs", "windows"],
)
def test_other_loops_over_a_stream_stay_with_the_worker(loop: Loop) -> None:
    assert resident(loop) == ({}, [False])


def test_a_node_with_two_forms_of_its_loop_has_no_rows() -> None:
    other = replace(speak(("code", "text", "state", RANDOM)), name="other")
    assert resident(speak(), other) == ({}, [False, False])


def test_a_loop_of_ids_alone_needs_no_rows() -> None:
    loop = Loop(
        "write", GraphNode(WRITER, ("token",), (GraphEdge("token", CLIENT, modality="text"),)), carry={"token": "token"}
    )
    assert resident(loop) == ({}, [True])


def problems(loop: Loop, node: NodeSpec = SPEAKER) -> list[str]:
    write = GraphNode(WRITER, ("tokens",), (StreamingGraphEdge("token", TEXT),))
    partitions = {"writer": {"write": write}, "speaker": {"speak": loop}}
    return [str(error) for error in check_graph([WRITER, node], [TEXT], partitions, ["heat"])]


def test_the_check_knows_random_numbers() -> None:
    assert problems(speak()) == []
    assert "outside a resident loop" in problems(speak((*INPUTS, STEP)))[0]
    for kind in ("f32[n]", "i64[3]"):
        node = replace(SPEAKER, ports={**SPEAKER.ports, "random": kind})
        assert "fixed shape" in problems(speak(node=node), node)[0]
    node = replace(SPEAKER, ports={name: kind for name, kind in SPEAKER.ports.items() if name != "random"})
    assert "does not have" in problems(speak(node=node), node)[0]


@pytest.mark.parametrize("port", ["text", "code"])
def test_a_task_outside_loops_whose_stream_ends_empty_is_skipped_and_reported(port: str) -> None:
    """Whether or not its port is optional: there is nothing left to do."""
    stream = replace(TEXT, into=(SPEAKER, port))
    walk = compile_walk("open", GraphNode(SPEAKER, (port,), OUT, attend=Attend(tokens=3)), [stream])
    state = WalkState(cut(walk, {"speaker": 0})[0])
    assert state.start() == [Want(0, "text", ())]
    assert state.stream_ended(0, ()) == [EndWalk("ended", {})] and state.alive == 0


def test_speech_with_a_code_predictor_fits() -> None:
    """State, stream, random numbers and parameters of a talker whose prompts have other inputs."""
    groups = ("temperature", "top_k", "top_p")
    predictor = tuple(from_param(f"predictor_{name}") for name in groups)
    talker = NodeSpec(
        name="Talker",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]?",
            "states": "any[m,d]?",
            "positions": "f32[3,n]",
            "text": "i64[1]?",
            "code0": "i64[1]",
            "last_hidden": "any[1024]",
            "text_ended": "b8[1]",
            "frame": "i64[16]",
            "voice": "i64",
            "random": "f32[15]",
            "predictor_temperature": "f32",
            "predictor_top_k": "i64",
            "predictor_top_p": "f32",
        },
        kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
        sampling=Sampling(port="code0", prefix="talker_"),
        sequence=("tokens", "states"),
    )
    text = Stream("text", into=(talker, "text"), chunk=FixedChunk(1, after_end="empty"), reject=(2,))
    first = GraphNode(talker, ("text", from_param("voice")), attend=Attend(tokens=6))
    carry = {name: name for name in ("code0", "last_hidden", "text_ended")}
    inputs = ("code0", "text", "last_hidden", "text_ended", RANDOM, *predictor)
    speak = Loop(
        "speak",
        GraphNode(talker, inputs, OUT, attend=Attend(tokens=1)),
        over=text,
        carry=carry,
        stop=StopOn("code0", (2150,)),
    )
    walks = compile_graph({"first": first, "speak": speak}, [text])
    assert walks["speak"].loops[0].runs_in_engine and walks["first"].taps == {0: "text"}
    assert set(walks["first"].tasks[0].holds) == set(carry)
    assert resident_ports(walks.values())["Talker"] == LoopPorts(
        id_port="code0",
        states=(("last_hidden", "last_hidden"), ("text_ended", "text_ended")),
        constants=predictor,
        feed="text",
        random=True,
    )
    write = GraphNode(WRITER, ("tokens",), (StreamingGraphEdge("token", text),))
    partitions = {"writer": {"write": write}, "talker": {"first": first, "speak": speak}}
    names = ["voice", *(f"predictor_{name}" for name in groups)]
    assert check_graph([WRITER, talker], [text], partitions, names) == []
