"""A request's first sound goes before further steps of its device: real workers on a GPU in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.fake_api import SampleRequest, SentRequest
from mstar_core.conformance.nodes import BuiltNode, RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.engine.base import JobKey
from mstar_core.engine.slack import MARGIN_S, Slack
from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    ChunkPolicy,
    GraphEdge,
    GraphNode,
    KVSpec,
    LeftContext,
    Loop,
    NodeSpec,
    Sampling,
    SlidingWindow,
    Stream,
    StreamingGraphEdge,
)
from mstar_core.plugin import Audio, ModelSpec, Partition, ProgramRequest, Run, Text, param
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_core.plugin.program import ProgramGenerator
from mstar_core.worker.state.first_sound import MOST_WAIT_S, FirstSounds
from mstar_core.worker.state.playback import Playback, Sound
from mstar_core.worker.state.request import ChunkJob, SpanTotal
from tests.fakes.seeing_talker import Processor as SeeingProcessor
from tests.fakes.virtual_gpu import HostCosts, VirtualGpu, put_on_gpu

FRAME_VALUES = 10
WIDTH, VOCAB = 2, 8

# Measured with Qwen3-TTS 1.7B on one H200, see `bench/results/gpu/profiles_h200.json`, in seconds.
API_S = 0.0039
"""Preparation, admission and the way to the worker."""
DELIVERY_S = 0.0005
COSTS = HostCosts(launch_s=0.0007, collect_s=0.0003)
PROMPT_S, FRAME_S = 0.0026, 0.0036
PIECE_S, PIECE_FRAME_S, PIECE_STREAM_S = 0.0017, 0.00006, 0.0003
BESIDE = {"codec": 0.28, "worker": 0.9}
"""Nine hundred small kernels of the codec take 9.7 ms beside the talker, and 1.8 ms alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    frames: int = param(60, "items of sound", ge=2)


@dataclass(frozen=True)
class Kind:
    """A family of speech models. item_s: sound of an item. step_s: time of the step that gives it.

    has_state: whether the codec's loop carries a state, which a walk before it begins.
    """

    chunk: ChunkPolicy
    item_s: float
    step_s: float = FRAME_S
    has_state: bool = False


FRAMES = Kind(LeftContext(8, 0, first=1, grows=True), 0.08, has_state=True)
"""Qwen3-TTS: a piece of one frame, then of 2, 4 and 8."""

WINDOWS = Kind(SlidingWindow(28, 7), 0.08 / 7, 0.0024)
"""Orpheus: seven ids are a frame, and a piece is the middle of four frames."""


def talker(request: ProgramRequest) -> ProgramGenerator:
    yield [Run("read", tokens=request.inputs["tokens"]), Run("speak", max_iters=request.params.frames - 1)]


def codec(request: ProgramRequest) -> ProgramGenerator:
    yield Run("sound")


def codec_with_state(request: ProgramRequest) -> ProgramGenerator:
    yield [Run("begin", fresh=request.inputs["fresh"]), Run("sound")]


def spec_of(kind: Kind) -> ModelSpec:
    speaker = NodeSpec(
        name="Talker",
        engine=KV_CACHE,
        ports={"tokens": "i64[n]", "code": "i64[1]"},
        kv=KVSpec(layers=1, kv_heads=1, head_dim=2),
        sampling=Sampling(port="code", vocab=VOCAB),
        sequence=("tokens", "code"),
    )
    vocoder = NodeSpec(
        name="codec",
        engine=STATELESS,
        ports={"fresh": "i64[1]", "codes": "i64[n]", "state": "f32[1]", "pcm": "f32[s]"},
        batch_key=("fresh", "codes"),
    )
    codes = Stream("codes", into=(vocoder, "codes"), chunk=kind.chunk)
    give = (StreamingGraphEdge("code", codes),)
    heard = (GraphEdge("pcm", CLIENT, modality="audio"),)
    state = {"state": "state"} if kind.has_state else {}
    sound = {"sound": Loop("chunks", GraphNode(vocoder, ("codes", *state), heard), over=codes, carry=state)}
    begin = {"begin": GraphNode(vocoder, ("fresh",))} if kind.has_state else {}
    program = codec_with_state if kind.has_state else codec
    return ModelSpec(
        name="speaker",
        title="Speaker",
        plugin="fake",
        inputs=(Text(),),
        outputs=(Audio(rate=round(FRAME_VALUES / kind.item_s)),),
        params=Params,
        nodes=(speaker, vocoder),
        streams=(codes,),
        partitions=(
            Partition(
                name="Talker",
                program=talker,
                walks={
                    "read": GraphNode(speaker, ("tokens",)),
                    "speak": Loop("speak", GraphNode(speaker, ("code",), give), carry={"code": "code"}),
                },
            ),
            Partition(name="Codec", program=program, walks={**begin, **sound}),
        ),
    )


class Processor(SeeingProcessor):
    """Reads every text as 24 ids."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        arrays = {"tokens": np.ones(24, dtype=np.int64), "fresh": np.zeros(1, dtype=np.int64)}
        return Inputs(arrays=arrays, prompt_tokens=24)


@dataclass
class LateGpu:
    """The GPU of modules that are built before it."""

    gpu: VirtualGpu | None = None

    def note(self, seconds: float) -> None:
        assert self.gpu is not None
        self.gpu.note(seconds)


class Talker(nn.Module):
    """A prompt pass, or an item of each sequence."""

    def __init__(self, gpu: LateGpu, step_s: float) -> None:
        super().__init__()
        self._gpu, self._step_s = gpu, step_s

    def forward(self, kv: Any, positions: Tensor, **ports: Tensor) -> dict[str, Tensor]:
        self._gpu.note(PROMPT_S if "tokens" in ports else self._step_s)
        return {"hidden": torch.zeros(len(positions), WIDTH)}

    def head(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), VOCAB)


class Codec(nn.Module):
    """Ten values of sound for each new item."""

    def __init__(self, gpu: LateGpu, kind: Kind) -> None:
        super().__init__()
        self._gpu, self._kind = gpu, kind

    def forward(
        self, codes: Tensor | None = None, state: Tensor | None = None, fresh: Tensor | None = None
    ) -> dict[str, Tensor]:
        if codes is None:
            assert fresh is not None
            self._gpu.note(1e-5)
            return {"state": torch.zeros(len(fresh), 1)}
        count, items = codes.shape
        self._gpu.note(PIECE_S + PIECE_FRAME_S * items + PIECE_STREAM_S * (count - 1))
        made = self._kind.chunk.stride if isinstance(self._kind.chunk, SlidingWindow) else items
        pcm = torch.zeros(count, FRAME_VALUES * made)
        return {"pcm": pcm} if state is None else {"pcm": pcm, "state": state}


@dataclass
class Heard:
    """A request in an open loop. gaps: pauses of the sound that its client heard."""

    comes: float
    call: SentRequest | None = None
    seen: int = 0
    dry_at: float | None = None
    gaps: int = 0
    first_s: float = 0.0

    def take(self, now: float, item_s: float) -> None:
        assert self.call is not None
        new, self.seen = self.call.items[self.seen :], len(self.call.items)
        for item in new:
            if self.dry_at is None:
                self.first_s = now + DELIVERY_S - self.comes
            self.gaps += self.dry_at is not None and now > self.dry_at
            self.dry_at = max(now, self.dry_at or now) + item.array.size / FRAME_VALUES * item_s


@dataclass
class Load:
    """An open loop in virtual time."""

    first_s: list[float]
    gaps: int
    ends: float
    launches: dict[str, list[float]] = field(default_factory=dict)

    def quantile(self, share: float) -> float:
        return self.first_s[int(len(self.first_s) * share)]


@cache
def run(folder: Path, kind: Kind, comes: tuple[float, ...], *, is_ordered: bool, frames: int = 60) -> Load:
    """Send requests at these times. is_ordered: whether a first sound goes before further steps."""
    settings = RuntimeSettings(
        slots=64, lookahead=1, page_size=64, max_seq_len=512, first_sound_requests=12 if is_ordered else 0
    )
    spec, late = spec_of(kind), LateGpu()
    speaker, vocoder = spec.nodes
    built = {
        "Talker": BuiltNode(node=speaker, module=Talker(late, kind.step_s), vocab=VOCAB),
        "codec": BuiltNode(node=vocoder, module=Codec(late, kind), vocab=0),
    }
    runtime = LocalRuntime(spec, folder, settings, built=built, processor=Processor())
    clock = runtime.clock
    clock.tick, start = 0.0, clock.now  # a report, due by real time, reads the clock
    late.gpu = VirtualGpu(clock, BESIDE, at=start)
    [worker] = runtime.workers
    runners = put_on_gpu(worker, late.gpu, COSTS)
    requests = [Heard(start + at) for at in comes]
    while any(each.call is None or each.call.outcome is None for each in requests):
        for each in requests:
            if each.call is None and clock.now >= each.comes + API_S:
                each.call = runtime.send(SampleRequest(text="x", params={"frames": frames}))
        if not runtime.step():
            clock.sleep(1e-4)
        for each in requests:
            if each.call is not None:
                each.take(clock.now, kind.item_s)
    assert [each.call.outcome.status for each in requests if each.call and each.call.outcome] == ["finished"] * len(
        comes
    )
    first_s, gaps = sorted(each.first_s for each in requests), sum(each.gaps for each in requests)
    return Load(first_s, gaps, clock.now - start, {name: runner.launched for name, runner in runners.items()})


def arrivals(per_s: float, count: int) -> tuple[float, ...]:
    chance, at, times = random.Random(4), 0.0, []
    for _ in range(count):
        at += chance.expovariate(per_s)
        times.append(at)
    return tuple(times)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speaker")


ALONE, OPEN_LOOP = (0.0,), arrivals(20, 60)


def test_without_it_steps_run_ahead_of_a_first_sound(folder: Path) -> None:
    """The virtual times are then near those that were measured: 21.8 ms, and 52.7 ms for 95 percent."""
    assert run(folder, FRAMES, ALONE, is_ordered=False).first_s[0] > 0.020
    assert run(folder, FRAMES, OPEN_LOOP, is_ordered=False).quantile(0.95) > 0.035


def test_a_first_sound_goes_before_further_steps(folder: Path) -> None:
    assert run(folder, FRAMES, ALONE, is_ordered=True).first_s[0] < 0.015


def test_beside_other_streams_it_still_comes_soon_and_none_of_them_runs_dry(folder: Path) -> None:
    load, before = (run(folder, FRAMES, OPEN_LOOP, is_ordered=is_ordered) for is_ordered in (True, False))
    assert load.quantile(0.5) < 0.025 and load.quantile(0.95) < 0.035 and load.gaps == 0
    assert load.ends < 1.01 * before.ends, "the throughput stays"


def test_a_first_window_of_many_ids_waits_only_for_its_last_one(folder: Path) -> None:
    load, before = (
        run(folder, WINDOWS, arrivals(6, 24), is_ordered=is_ordered, frames=280) for is_ordered in (True, False)
    )
    assert load.quantile(0.5) < 0.9 * before.quantile(0.5) and load.quantile(0.95) <= before.quantile(0.95)
    assert load.gaps <= before.gaps and load.ends < 1.01 * before.ends


def test_many_requests_run_the_same_steps_at_the_same_times(folder: Path) -> None:
    """A full device has no time to wait."""
    load, before = (run(folder, FRAMES, (0.0,) * 32, is_ordered=is_ordered) for is_ordered in (True, False))
    assert load.launches == before.launches and len(load.launches["Talker"]) >= 60


def test_no_step_waits_for_a_first_sound_that_is_late_or_while_a_stream_runs_dry() -> None:
    clock, left = FakeClock(10.0), [math.inf]
    playback = Playback(rate=100.0, clock=clock)
    playback.piece_s = 0.01
    request = SimpleNamespace(sound=Sound(taken=1, taken_at=10.0))
    piece = ChunkJob(cast("Any", request), cast("Any", None), 0, SpanTotal())
    first = FirstSounds(
        "codec", ["Talker"], playback, lambda: 1, lambda loop: 1, Slack(lambda: left[0]), most_requests=1
    )
    assert not first.must_wait("Talker", [])
    first.jobs[JobKey(1)] = "codec", piece
    assert first.must_wait("Talker", []) and not first.must_wait("codec", [])
    left[0] = MARGIN_S + 0.005
    assert not first.must_wait("Talker", []), "a listener hears a gap"
    left[0] = math.inf
    clock.sleep(MOST_WAIT_S)
    assert not first.must_wait("Talker", []), "the codec may wait for something else"
