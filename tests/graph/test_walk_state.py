"""Actions of a WalkState, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar_core.errors import GraphError
from mstar_core.graph import (
    CLIENT,
    AskStop,
    Emit,
    EndWalk,
    Fire,
    FireLoop,
    FixedChunk,
    Free,
    Held,
    Hold,
    Key,
    Loop,
    Recall,
    RunInput,
    Save,
    Send,
    Sequential,
    StopOn,
    StopWhen,
    Stream,
    Walk,
    WalkState,
    Want,
    compile_walk,
)
from mstar_core.graph import GraphEdge as E
from mstar_core.graph import GraphNode as N
from mstar_core.graph.compile.cut import cut
from tests.graph.families import kv_node, orpheus, pi05, plain

OUT = E("y", CLIENT, modality="tensor")
A = plain("alpha", x="f32[n]", y="f32[n]", flag="b8")
B = plain("beta", x="f32[n]?", y="f32[n]", ids="i64[n]")
C = plain("gamma", x="f32[n]", y="f32[n]")


def state(walk: Walk, max_iters: int | dict[str, int] | None = None, given: set[str] | None = None) -> WalkState:
    return WalkState(
        cut(compile_walk("go", walk), {"alpha": 0, "beta": 0, "gamma": 0, "LLM": 0})[0], max_iters, given or set()
    )


def test_an_engine_loop_is_one_job_that_starts_from_the_held_value() -> None:
    family = orpheus()
    run = WalkState(cut(compile_walk("decode", family.walks["decode"]), {"LLM": 0})[0], 5)
    held = Held("LLM", "token")
    assert run.start() == [FireLoop(0, 0, (), {"token": held}, ("main",), 5, held)]
    last = Key(0, "token", (2,))
    assert run.loop_done(0, (), "stop", 3, {"token"}) == [
        Hold("LLM", "token", last),
        Free(last),
        EndWalk("stop", {"decode_loop": 3}),
    ]


def test_a_limit_of_zero_skips_a_loop_and_hands_out_the_starting_value() -> None:
    run = WalkState(cut(compile_walk("go", pi05().walks["action_gen"]), {"LLM": 0})[0], 0, {"actions"})
    assert run.start() == [Emit(RunInput("actions"), "actions", "action", ()), EndWalk("done", {"flow": 0})]


def test_a_limit_of_zero_still_asks_whether_the_starting_value_is_a_stop() -> None:
    """A request for one id whose prompt draws the stop id ended by itself, not by its limit."""
    for reason in ("stop", "length"):
        run = WalkState(cut(compile_walk("decode", orpheus().walks["decode"]), {"LLM": 0})[0], 0)
        held = Held("LLM", "token")
        assert run.start() == [FireLoop(0, 0, (), {"token": held}, ("main",), 0, held)]
        assert run.loop_done(0, (), reason, 0, set()) == [EndWalk(reason, {"decode_loop": 0})]


def test_a_loop_without_limit_or_stop_is_refused() -> None:
    with pytest.raises(
        GraphError, match="loop 'flow' of walk 'go' has neither a limit nor a stop rule; give the Run max_iters"
    ):
        WalkState(cut(compile_walk("go", pi05().walks["action_gen"]), {"LLM": 0})[0])


def test_limits_name_loops_that_exist() -> None:
    loop = Loop("again", N(A, ("x",), (OUT,)))
    with pytest.raises(GraphError, match="has no loop 'agian'; did you mean 'again'"):
        state(loop, {"agian": 1})
    with pytest.raises(GraphError, match="2 loops, so one max_iters is not enough"):
        state(Sequential(loop, Loop("more", N(B, ("x",), (OUT,)))), 1)


def test_a_node_without_its_required_input_is_skipped_and_so_is_what_follows() -> None:
    walk = Sequential(N(A, ("x",), (E("y", C, into="x"),)), N(C, ("x",), (OUT,)))
    assert state(walk).start() == [EndWalk("done", {})]


def test_a_node_whose_optional_input_cannot_come_fires_without_it() -> None:
    walk = Sequential(N(A, ("x",), (E("y", B, into="x"),)), N(B, ("x",), (OUT,)))
    assert state(walk).start() == [Fire(1, (), {}, ())]


def test_a_port_that_is_not_produced_does_not_fire_its_edge() -> None:
    walk = Sequential(N(A, ("x",), (E("y", C, into="x"), OUT)), N(C, ("x",), (OUT,)))
    run = state(walk, given={"x"})
    run.start()
    assert run.done(0, (), set()) == [EndWalk("done", {})]


def test_a_value_is_freed_once_when_its_last_consumer_is_done() -> None:
    walk = Sequential(N(A, ("x",), (E("y", B, into="x"), E("y", C, into="x"))), N(B, ("x",)), N(C, ("x",), (OUT,)))
    run, value = state(walk, given={"x"}), Key(0, "y", ())
    run.start()
    assert [type(action) for action in run.done(0, (), {"y"})] == [Fire, Fire]
    assert run.done(1, (), set()) == []
    assert run.done(2, (), set()) == [Free(value), EndWalk("done", {})]
    assert run.alive == 0


def pair(stop: StopOn | StopWhen | None = None) -> Loop:
    body = Sequential(N(A, ("x",), (E("y", C, into="x"),)), N(C, ("x",)))
    return Loop("again", body, carry={"y": "x"}, stop=stop, outputs=(OUT,))


def two_rounds(run: WalkState) -> list[object]:
    seen: list[object] = []
    todo: list[object] = list(run.start())
    while todo:
        action = todo.pop(0)
        seen.append(action)
        if isinstance(action, Fire):
            todo += run.done(action.task, action.iteration, {"y"}, stop=action.iteration == (1,))
        elif isinstance(action, AskStop):
            todo += run.tested(action.loop, action.iteration, False)
    return seen


def test_a_loop_hands_out_its_last_iterations_value() -> None:
    seen = two_rounds(state(pair(), 2, {"x"}))
    assert [action.iteration for action in seen if isinstance(action, Fire)] == [(0,), (0,), (1,), (1,)]
    assert [action for action in seen if isinstance(action, Emit)] == [Emit(Key(0, "y", (1,)), "y", "tensor", ())]
    assert seen[-1] == EndWalk("done", {"again": 2})


def test_a_stop_rule_ends_a_loop_before_its_limit() -> None:
    seen = two_rounds(state(pair(StopWhen("flag")), 9, {"x"}))
    assert seen[-1] == EndWalk("stop", {"again": 2})


def test_the_starting_value_is_tested_and_may_end_a_loop_before_it_begins() -> None:
    body = Sequential(N(A, ("x",), (E("y", C, into="x"),)), N(C, ("x",)))
    walk = Loop("again", body, carry={"y": "x"}, stop=StopWhen("y"))
    run = state(walk, None, {"x"})
    assert run.start() == [AskStop(0, (), RunInput("x"))]
    assert run.tested(0, (), True) == [EndWalk("stop", {"again": 0})]


def test_a_loop_pins_what_it_starts_from() -> None:
    run = state(pair(), 1)
    pinned = Key(2, "x", (-1,))
    assert run.start() == [Recall(pinned, "alpha", "y"), Fire(0, (0,), {"x": pinned}, ())]


STREAM = Stream("s", (B, "x"), FixedChunk(1))
ENDLESS = Stream("s", (B, "x"), FixedChunk(1, after_end="empty"))


def test_a_loop_over_a_stream_runs_once_per_chunk_and_ends_with_it() -> None:
    run = state(Loop("chunks", N(B, ("x",), (OUT,)), over=STREAM))
    assert run.start() == [Want(1, "s", (0,))]
    chunk = Key(1, "$chunk", (0,))
    assert run.chunk(1, (0,)) == [Fire(0, (0,), {"x": chunk}, ())]
    assert run.done(0, (0,), set()) == [Free(chunk), Want(1, "s", (1,))]
    assert run.stream_ended(1, (1,)) == [EndWalk("done", {"chunks": 1})]


def test_after_an_empty_end_a_loop_goes_on_without_the_port_until_its_limit() -> None:
    run = state(Loop("chunks", N(B, ("x",), (OUT,)), over=ENDLESS), 2)
    run.start()
    assert run.stream_ended(1, (0,)) == [Fire(0, (0,), {}, ())]
    assert run.done(0, (0,), set()) == [Fire(0, (1,), {}, ())]
    assert run.done(0, (1,), set()) == [EndWalk("length", {"chunks": 2})]


def test_after_an_empty_end_a_loop_that_nothing_else_ends_is_over() -> None:
    run = state(Loop("chunks", N(B, ("x",), (OUT,)), over=ENDLESS))
    run.start()
    assert run.stream_ended(1, (0,)) == [EndWalk("done", {"chunks": 0})]


def test_a_node_outside_a_loop_takes_one_chunk() -> None:
    walk = compile_walk("go", N(B, ("x",), (OUT,)), [STREAM])
    run = WalkState(cut(walk, {"beta": 0})[0])
    assert run.start() == [Want(0, "s", ())]
    assert run.chunk(0, ()) == [Fire(0, (), {"x": Key(0, "$chunk", ())}, ())]


def test_a_loop_whose_stop_port_cannot_come_any_more_ends() -> None:
    body = Sequential(N(A, ("x",), (E("y", C, into="x"),)), N(C, ("x",), (OUT,)))
    run = state(Loop("again", body, stop=StopWhen("flag")))
    assert run.start() == [EndWalk("done", {"again": 1})]


def test_cancelling_frees_everything_and_late_results_too() -> None:
    walk = Sequential(N(A, ("x",), (E("y", C, into="x"),)), N(C, ("x",), (OUT,)))
    run = state(walk, given={"x"})
    run.start()
    run.done(0, (), {"y"})
    assert run.cancel() == [Free(Key(0, "y", ())), EndWalk("cancelled", {})]
    assert run.cancel() == []
    assert run.done(1, (), {"y"}) == [Free(Key(1, "y", ()))]


def test_values_cross_ranks_and_the_leader_sends_marks_of_a_loop() -> None:
    walk = compile_walk("go", pair())
    home: dict[int | str, int] = {"alpha": 0, "gamma": 1}
    one, two = (WalkState(share, 1, {"x"}) for share in cut(walk, home).values())
    assert one.start() == [Send(1, 2, "$go", (0,), None), Fire(0, (0,), {"x": RunInput("x")}, ())]
    assert two.start() == []
    value = Key(0, "y", (0,))
    assert one.done(0, (0,), {"y"}) == [
        Hold("alpha", "y", value),
        Send(1, 0, "y", (0,), value),
        Send(1, 2, "$end:done", (1,), None),
        Emit(value, "y", "tensor", ()),
        Free(value),
        EndWalk("done", {"again": 1}),
    ]
    assert two.arrived(0, "y", (0,), True) == []
    assert two.arrived(2, "$end:done", (1,), False) == [Fire(1, (0,), {"x": value}, ())]
    assert two.done(1, (0,), set()) == [Free(value), EndWalk("done", {})]
    crossing = [(rank, fanout.ranks) for rank, share in cut(walk, home).items() for fanout in share.fanouts.values()]
    assert [(rank, others) for rank, others in crossing if others] == [(0, [1])]


def test_a_node_without_a_place_is_named() -> None:
    with pytest.raises(GraphError, match="walk 'go' has no rank for node 'gamma'; place it in a node group"):
        cut(compile_walk("go", pair()), {"alpha": 0})


def test_a_long_loop_that_nothing_fires_in_does_not_overflow_the_stack() -> None:
    body = Sequential(N(A, ("x",), (E("y", C, into="x"),)), N(C, ("x",), (OUT,)))
    assert state(Loop("again", body), 5000).start() == [EndWalk("done", {"again": 5000})]


def test_what_a_later_run_may_start_from_is_held_in_every_walk() -> None:
    llm = kv_node("LLM", {"tokens": "i64[n]", "token": "i64[1]"}, sampling="token")
    holds = {"LLM": frozenset({"token"})}
    walk = compile_walk("prefill", N(llm, ("tokens",)), (), holds)
    assert walk.tasks[0].used == ("token",)
    run = WalkState(cut(walk, {"LLM": 0})[0], None, {"tokens"})
    run.start()
    value = Key(0, "token", ())
    assert run.done(0, (), {"token"}) == [Hold("LLM", "token", value), Free(value), EndWalk("done", {})]


def saving(**fields: Any) -> Loop:
    return replace(pair(), save_every=2, **fields)


def all_of(run: WalkState, values: set[str]) -> list[object]:
    """Return all actions of a run whose tasks end at once."""
    seen: list[object] = []
    todo: list[object] = list(run.start())
    while todo:
        action = todo.pop(0)
        seen.append(action)
        if isinstance(action, Fire):
            todo += run.done(action.task, action.iteration, values)
    return seen


def saves(actions: list[object]) -> list[tuple[int, dict[str, Any]]]:
    return [(action.iteration, action.values) for action in actions if isinstance(action, Save)]


def test_a_loop_saves_what_it_carries_every_few_iterations_and_before_the_last() -> None:
    seen = all_of(state(saving(), 6, {"x"}), {"y"})
    assert saves(seen) == [(at, {"x": Key(0, "y", (at - 1,))}) for at in (2, 4, 5)]
    for number, action in enumerate(seen):
        if isinstance(action, Save):
            (value,) = action.values.values()
            assert Free(value) not in seen[:number], "the value is still stored"


def test_a_value_that_was_not_produced_is_not_saved() -> None:
    assert saves(all_of(state(saving(), 6, {"x"}), set())) == []


def test_a_loop_begins_in_a_saved_iteration_as_if_it_had_run_from_the_start() -> None:
    run = saved_state(4)
    first = run.start()
    assert first == [Fire(0, (4,), {"x": RunInput("again/x")}, ())]
    assert all_of(saved_state(4), {"y"})[-1] == EndWalk("done", {"again": 6})
    assert [at for at, _ in saves(all_of(saved_state(4), {"y"}))] == [5], "what it was given is not saved again"
    assert run.alive == 0


def saved_state(first: int, walk: Loop | None = None) -> WalkState:
    compiled = compile_walk("go", walk or saving())
    return WalkState(cut(compiled, {"alpha": 0, "gamma": 0})[0], 6, {"x"}, firsts={"again": first})


@pytest.mark.parametrize(("first", "walk"), [(6, saving()), (7, saving()), (4, pair())])
def test_a_saved_iteration_that_the_loop_does_not_have_is_not_used(first: int, walk: Loop) -> None:
    assert saved_state(first, walk).start() == [Fire(0, (0,), {"x": RunInput("x")}, ())]


def test_a_saved_value_replaces_what_the_walk_computes_before_its_loop() -> None:
    walk = Sequential(N(B, ("x",), (E("y", A, into="x"),)), saving())
    run = WalkState(cut(compile_walk("go", walk), {"alpha": 0, "beta": 0, "gamma": 0})[0], 6, firsts={"again": 3})
    fires = [action for action in all_of(run, {"y"}) if isinstance(action, Fire)]
    assert [(fire.task, fire.iteration) for fire in fires if fire.task == 1] == [(1, (at,)) for at in (3, 4, 5)]
    assert next(fire for fire in fires if fire.task == 1).inputs == {"x": RunInput("again/x")}
    assert run.ended and run.alive == 0
