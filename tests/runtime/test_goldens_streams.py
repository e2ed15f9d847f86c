"""Golden id streams through the streaming edge: a scripted language model, the real vocoder and executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.engine.base import Job
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.messages.flow import Outputs
from mstar_core.messages.work import EndStream, OpenRequest, RunWalk, RunWalks, WalkDone, WorkFailed
from mstar_core.transport.tensors import inline, inline_array
from mstar_core.worker.executor import Executor
from mstar_core.worker.outbox import Outbox
from tests.fakes.courier import FakeCourier
from tests.fakes.runner import FakeRunner
from tests.runtime.golden import SEQUENCES, STRIDE, WINDOW, Built, Golden
from tests.worker.test_executor import InlineTransport

INT16 = 2
OFF = {"noise": "off", "ignore_eos": False, "flush": False}


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.find()


@pytest.fixture(scope="module")
def built(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built.load(golden.lay_out(tmp_path_factory.mktemp("golden") / "checkpoint"))


class Edge:
    """One rank with a scripted language model, driven as the conductor does."""

    def __init__(self, built: Built, scripts: Mapping[int, list[int]]) -> None:
        self.scripts = scripts
        self.post = FakeCourier()
        self.lm = FakeRunner("LLM", self._first, lambda handle: scripts[handle][1:])
        node = built.spec.node("snac_decoder")
        self.snac = StatelessEngine(node, built.vocoder, device=torch.device("cpu"), dtype=torch.float32)
        self.runners = {"LLM": self.lm, "snac_decoder": self.snac}
        self.outbox = Outbox("worker-0", 0, self.post, InlineTransport())
        self.executor = Executor(built.spec, 0, self.runners, self.outbox, InlineTransport(), lambda: 0.0)

    def _first(self, job: Job) -> dict[str, torch.Tensor]:
        return {"token": torch.tensor([self.scripts[job.handle][0]])}

    def speak(self, limits: Mapping[int, int] | None = None) -> dict[int, np.ndarray]:
        """Run all scripts together to their ends. Returns int16 [chunks, samples]. limits: most ids of a request."""
        for handle, script in self.scripts.items():
            homes = {"LLM": 0, "snac_decoder": 0}
            opened = OpenRequest(handle=handle, params=OFF, seed=handle, homes=homes, max_tokens=200, outputs=["audio"])
            self.executor.open(opened)
            self._walk(handle, "SNAC", 1, "snac_chunk")
            self._walk(handle, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(1, 4))})
            self._walk(handle, "LLM", 3, "decode", max_iters=(limits or {}).get(handle, max(2, len(script))) - 1)
        self._turn_until_idle()
        decoded = [done for done in self.post.of(WalkDone) if done.run == 3]
        assert sorted(done.handle for done in decoded) == sorted(self.scripts)
        for done in decoded:
            total = done.streamed["audio_ids"]  # counts from the request's begin
            self.executor.end_stream(EndStream(handle=done.handle, stream="audio_ids", total=total))
        self._turn_until_idle()
        assert not self.post.of(WorkFailed)
        ended = {done.handle for done in self.post.of(WalkDone) if done.run == 1}
        assert ended == set(self.scripts), "every vocoder walk ends, also those without a window"
        return {handle: self._sound(handle) for handle in self.scripts}

    def reason(self, handle: int) -> str:
        [done] = [done for done in self.post.of(WalkDone) if (done.handle, done.run) == (handle, 3)]
        return str(done.reason)

    def _walk(self, handle: int, partition: str, run: int, walk: str, **fields: Any) -> None:
        self.executor.run(RunWalks(handle=handle, partition=partition, runs=[RunWalk(run=run, walk=walk, **fields)]))

    def _turn_until_idle(self) -> None:
        for _ in range(2000):
            for runner in (self.lm, self.snac):
                step = runner.launch()
                if step is not None:
                    self.executor.take(runner.collect(step))
            self.outbox.flush()
            if not any(runner.pressure().ready for runner in self.runners.values()):
                return
        raise AssertionError("the work does not end")

    def _sound(self, handle: int) -> np.ndarray:
        items = [item for message in self.post.of(Outputs) for item in message.items if item.handle == handle]
        assert [item.seq for item in items] == list(range(len(items)))
        return np.stack([inline_array(item.ref) for item in items]) if items else np.zeros((0, 0), np.int16)


def raw(golden: Golden, index: int) -> list[int]:
    return [int(token) for token in golden.snac[f"raw_stream_{index}"]]


def assert_reference(golden: Golden, index: int, sound: np.ndarray) -> None:
    wanted = golden.snac[f"stream_chunks_int16_{index}"].numpy().astype(np.int32)
    assert sound.dtype == np.int16 and sound.shape == wanted.shape
    assert int(np.abs(sound.astype(np.int32) - wanted).max()) <= INT16


@pytest.mark.parametrize("index", SEQUENCES)
def test_a_raw_stream_alone_gives_the_reference_chunks(index: int, golden: Golden, built: Built) -> None:
    edge = Edge(built, {1: raw(golden, index)})
    assert_reference(golden, index, edge.speak()[1])
    assert edge.reason(1) == "stop"


def test_raw_streams_mixed_with_others_give_the_same_bytes_as_alone(golden: Golden, built: Built) -> None:
    alone = {index: Edge(built, {1: raw(golden, index)}).speak()[1] for index in SEQUENCES}
    start, book = golden.config["audio_token_offset"], golden.config["codebook_size"]
    other = [start + slot * book + (7 * frame) % book for frame in range(9) for slot in range(7)]
    one, two = SEQUENCES[0], SEQUENCES[-1]
    edge = Edge(built, {1: raw(golden, one), 2: other, 3: raw(golden, two), 4: raw(golden, one), 5: other[3:60]})
    mixed = edge.speak()
    for handle, index in ((1, one), (3, two), (4, one)):
        assert_reference(golden, index, mixed[handle])
        assert np.array_equal(mixed[handle], alone[index])


def spoken(golden: Golden, count: int) -> list[int]:
    """Return the first ids of the longest sequence."""
    ids = golden.snac[f"audio_ids_{SEQUENCES[-1]}"]
    if len(ids) < count:
        pytest.skip(f"runs when MSTAR_GOLDEN names a set that has a sequence of {count} ids")
    return [int(token) for token in ids[:count]]


@pytest.mark.parametrize(
    ("count", "chunks"),
    [(0, 0), (1, 0), (20, 0), (WINDOW - 1, 0), (WINDOW, 1), (WINDOW + 3, 1), (WINDOW + STRIDE + 6, 2)],
)
def test_a_request_that_stops_gives_its_whole_windows(count: int, chunks: int, golden: Golden, built: Built) -> None:
    """Stop at prefill (0), before the first window, at a window, and within a frame."""
    edge = Edge(built, {1: [*spoken(golden, count), built.stop_id]})
    sound = edge.speak()[1]
    assert len(sound) == chunks
    if chunks:
        wanted = golden.snac[f"stream_chunks_int16_{SEQUENCES[-1]}"][:chunks].numpy().astype(np.int32)
        assert int(np.abs(sound.astype(np.int32) - wanted).max()) <= INT16
    assert edge.reason(1) == "stop"


@pytest.mark.parametrize(("limit", "chunks"), [(1, 0), (WINDOW - 1, 0), (WINDOW, 1), (WINDOW + STRIDE + 2, 2)])
def test_a_request_at_its_output_limit_ends_by_length(limit: int, chunks: int, golden: Golden, built: Built) -> None:
    edge = Edge(built, {1: spoken(golden, WINDOW + STRIDE + 6)})
    assert len(edge.speak({1: limit})[1]) == chunks
    assert edge.reason(1) == "length"
