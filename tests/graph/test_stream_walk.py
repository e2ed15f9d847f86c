"""A walk that is one loop over a stream around one stateless node."""

from __future__ import annotations

from dataclasses import replace

from mstar_core.graph import compile_walk, cut
from mstar_core.graph.compile.compiled import Kind, Source
from mstar_core.graph.compile.cut import RankWalk
from mstar_core.graph.declare.streams import Chunk
from mstar_core.graph.runtime.actions import EndWalk, RunInput, Special, Want
from mstar_core.graph.runtime.stream_walk import StreamWalk
from mstar_orpheus.plugin import ORPHEUS

WALKS = {name: walk for partition in ORPHEUS.partitions for name, walk in partition.walks.items()}


def share(name: str) -> RankWalk:
    walk = compile_walk(name, WALKS[name])
    return cut(walk, {task.name: 0 for task in walk.tasks})[0]


def test_the_walk_of_a_codec_fits_unless_its_iterations_are_limited() -> None:
    codec = share("snac_chunk")
    assert StreamWalk.fits(codec, None, ())
    assert not StreamWalk.fits(codec, 3, ())
    assert not StreamWalk.fits(share("prefill"), None, ("tokens",)), "it has no loop over a stream"


def test_a_walk_whose_task_reads_an_input_fits_only_a_run_that_gives_it() -> None:
    codec = share("snac_chunk")
    (task,) = codec.walk.tasks
    voice = {"$param:seed": Source(Kind.RUN, -1, "voice")}
    reads = tuple(replace(entry, source=voice.get(entry.port, entry.source)) for entry in task.inputs)
    reading = replace(codec, walk=replace(codec.walk, tasks=(replace(task, inputs=reads),)))
    assert StreamWalk.fits(reading, None, ("voice",)) and not StreamWalk.fits(reading, None, ())
    assert StreamWalk(reading, ("voice",)).fixed["$param:seed"] == RunInput("voice")


def test_chunks_are_counted_and_the_walk_ends_with_its_stream() -> None:
    walk = StreamWalk(share("snac_chunk"), ())
    (want,) = walk.start()
    assert isinstance(want, Want) and (want.stream, want.iteration) == ("audio_ids", (0,))
    assert walk.fixed["$param:noise"] == Special("$param:noise", 0)
    numbers = [walk.numbers(Chunk(0, 28, True, False)), walk.numbers(Chunk(7, 35, False, True))]
    assert [(each["$step"], each["$first"], each["$last"]) for each in numbers] == [(0, True, False), (1, False, True)]
    assert walk.stream_ended(want.address, (2,)) == [EndWalk("done", {walk.walk.loops[0].name: 2})]
    assert walk.ended and walk.cancel() == []


def test_a_cancelled_walk_ends_once() -> None:
    walk = StreamWalk(share("snac_chunk"), ())
    walk.start()
    assert [type(action) for action in walk.cancel()] == [EndWalk]
    assert walk.cancel() == [] and walk.stream_ended(1, (0,)) == []
