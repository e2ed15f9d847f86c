"""First sound and gaps beside other streams, counted in turns of the loop, which no load of the machine changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.conformance.fake_api import SampleRequest, SentRequest
from mstar_core.conformance.nodes import BuiltNode, build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.spec import ModelSpec
from mstar_orpheus.checkpoint.config import WINDOW_FRAMES
from mstar_orpheus.plugin import ORPHEUS, Params
from mstar_orpheus.sources.tiny import write_tiny

LONG = {"max_output_tokens": 300, "temperature": 0.8, "ignore_eos": True}
STRIDE, STREAMS = 7, 8
"""Ids of a chunk, after the first; streams at once."""
BEGUN = 60
"""Turns after which the other streams are in the middle."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "orpheus")


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return ORPHEUS.bound(folder, {})


@pytest.fixture(scope="module")
def built(spec: ModelSpec, folder: Path) -> dict[str, BuiltNode]:
    return build_nodes(spec, folder)


def speech(seed: int) -> SampleRequest:
    return SampleRequest(text="hello there", params={**LONG, "seed": seed}, outputs=["audio"])


def turns_to_sound(bench: LocalRuntime, *calls: SentRequest) -> list[int]:
    """Take turns until each call has its first sound. Returns how many each needed."""
    needed: dict[int, int] = {}
    for turn in range(1, 500):
        bench.step()
        needed |= {call.handle: turn for call in calls if call.items and call.handle not in needed}
        if len(needed) == len(calls):
            return [needed[call.handle] for call in calls]
    raise AssertionError("no sound came")


@pytest.fixture(scope="module")
def alone(spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]) -> int:
    """Turns to the first sound of a request alone."""
    bench = LocalRuntime(spec, folder, built=built)
    [turns] = turns_to_sound(bench, bench.send(speech(1)))
    return turns


@pytest.mark.parametrize("others", [1, 3, 7])
def test_streams_in_progress_delay_the_first_sound_by_a_few_steps(
    others: int, alone: int, spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]
) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    for seed in range(others):
        bench.send(speech(seed))
    for _ in range(BEGUN):
        bench.step()
    [turns] = turns_to_sound(bench, bench.send(speech(99)))
    assert turns <= alone + STRIDE


@pytest.mark.parametrize("count", [2, 8])
def test_requests_at_once_get_their_first_sound_at_once(
    count: int, alone: int, spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]
) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    turns = turns_to_sound(bench, *(bench.send(speech(seed)) for seed in range(count)))
    assert max(turns) <= alone + 1, "their steps are shared"


def test_streams_that_began_one_after_the_other_all_go_on_evenly(
    spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]
) -> None:
    """At most as many turns between two chunks as the language model and the vocoder of each stream need in turn.

    The second chunk waits for the ids that the first window left out, too.
    """
    strides = 1 + WINDOW_FRAMES - Params().first_window_frames
    bench = LocalRuntime(spec, folder, built=built)
    calls: list[SentRequest] = []
    counts: dict[int, int] = {}
    since: dict[int, int] = {}
    gaps: list[int] = []
    second: list[int] = []
    for turn in range(40 * STREAMS):
        if turn % 9 == 0 and len(calls) < STREAMS:
            calls.append(bench.send(speech(turn)))
        bench.step()
        for call in calls:
            if len(call.items) > counts.get(call.handle, 0):
                kept = second if counts.get(call.handle) == 1 else gaps
                kept += [turn - since[call.handle]] if call.handle in since else []
                counts[call.handle], since[call.handle] = len(call.items), turn
    assert len(gaps) >= 10 * STREAMS and max(gaps) <= STRIDE + STREAMS
    assert len(second) == STREAMS and max(second) <= strides * (STRIDE + STREAMS)
