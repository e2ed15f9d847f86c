"""The executor from outside: the conductor's messages in, outputs and reports out, with runners that have no model."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.engine.base import Failed, Handle, Job, StepResult
from mstar_core.errors import EngineError
from mstar_core.graph.runtime.stream_walk import StreamWalk
from mstar_core.messages.flow import Outputs, StreamItems
from mstar_core.messages.tensors import InlineTensor
from mstar_core.messages.work import EndStream, OpenRequest, RunWalk, RunWalks, WalkDone, WorkFailed
from mstar_core.transport.tensors import inline, inline_array
from mstar_core.worker.executor import Executor
from mstar_core.worker.outbox import Outbox
from mstar_orpheus.plugin import ORPHEUS
from tests.fakes.courier import FakeCourier
from tests.fakes.runner import FakeRunner

STOP = 128258
FIRST = 128266


class InlineTransport:
    """A tensor transport that puts everything into the message."""

    endpoint = ""
    live = 0
    used_bytes = 0

    def put(self, array: np.ndarray, to: str, *, dtype: str | None = None) -> InlineTensor:
        return inline(array, dtype)

    def get(self, ref: InlineTensor) -> np.ndarray:
        return inline_array(ref)

    copy = get

    def read(self, ref: InlineTensor, copier: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor:
        return copier(inline_array(ref))

    def release(self, slot: int, generation: int) -> bool:
        return False

    def connect(self, peer: str, endpoint: str, incarnation: int) -> None: ...

    def reclaim(self, peer: str, incarnation: int | None = None) -> int:
        return 0

    def close(self) -> None: ...


class Bench:
    """An executor on one rank with its fakes."""

    def __init__(
        self, scripts: dict[int, list[int]], *, nodes: tuple[str, ...] = ("LLM", "snac_decoder"), rank: int = 0
    ) -> None:
        self.post = FakeCourier()
        self.lm = FakeRunner("LLM", self._prefill, lambda handle: scripts[handle][1:])
        self.snac = FakeRunner("snac_decoder", lambda job: {"pcm": job.inputs["window"].to(torch.int32)})
        self.scripts = scripts
        runners = {name: runner for name, runner in (("LLM", self.lm), ("snac_decoder", self.snac)) if name in nodes}
        outbox = Outbox(f"worker-{rank}", rank, self.post, InlineTransport())
        self.outbox = outbox
        self.runners = runners
        self.executor = Executor(ORPHEUS, rank, runners, outbox, InlineTransport(), lambda: 0.0)

    def _prefill(self, job: Job) -> dict[str, torch.Tensor]:
        return {"token": torch.tensor([self.scripts[job.handle][0]])}

    def open(self, handle: int, homes: dict[str, int] | None = None, **params: Any) -> None:
        homes = homes or {"LLM": 0, "snac_decoder": 0}
        self.executor.open(
            OpenRequest(handle=handle, params=params, seed=1, homes=homes, max_tokens=100, outputs=["audio"])
        )

    def walk(self, handle: int, partition: str, run: int, walk: str, **fields: Any) -> None:
        self.executor.run(RunWalks(handle=handle, partition=partition, runs=[RunWalk(run=run, walk=walk, **fields)]))

    def turn(self) -> None:
        for runner in self.runners.values():
            step = runner.launch()
            self.executor.take(runner.collect(step))
        self.outbox.flush()

    def turns(self, count: int = 200) -> None:
        for _ in range(count):
            self.turn()
            if not any(runner.pressure().ready for runner in self.runners.values()):
                return
        raise AssertionError("the work does not end")

    def speak(self, handle: int, max_iters: int = 99) -> None:
        """Both partitions, as the conductor would drive them."""
        self.walk(handle, "SNAC", 1, "snac_chunk")
        tokens = inline(np.arange(5))
        self.walk(handle, "LLM", 2, "prefill", inputs={"tokens": tokens})
        self.turns()
        self.walk(handle, "LLM", 3, "decode", max_iters=max_iters)
        self.turns()
        total = self.post.of(WalkDone)[-1].streamed["audio_ids"]
        self.executor.end_stream(EndStream(handle=handle, stream="audio_ids", total=total))
        self.turns()

    def pcm(self, handle: int) -> list[list[int]]:
        items = [item for message in self.post.of(Outputs) for item in message.items if item.handle == handle]
        assert [item.seq for item in items] == list(range(len(items)))
        return [inline_array(item.ref).tolist() for item in items]


def ids(count: int, start: int = FIRST) -> list[int]:
    return list(range(start, start + count))


def windows(values: list[int]) -> list[list[int]]:
    return [values[i : i + 28] for i in range(0, len(values) - 27, 7)]


@pytest.mark.parametrize("count", [0, 1, 27, 28, 34, 35, 70])
def test_windows_leave_in_order_and_the_walks_report(count: int) -> None:
    bench = Bench({1: [*ids(count), STOP]})
    bench.open(1)
    bench.speak(1)
    assert bench.pcm(1) == windows(ids(count))
    last = bench.post.of(WalkDone)[-1]
    assert (last.run, last.emitted) == (1, max(0, (count - 28) // 7 + 1))
    decode = next(done for done in bench.post.of(WalkDone) if done.run == 3)
    assert decode.reason == "stop" and decode.streamed["audio_ids"] == count + 1 or count == 0


def test_special_ids_never_enter_a_window() -> None:
    script = ids(28)
    noisy = [script[0], 5, *script[1:14], 128257, *script[14:], STOP]
    bench = Bench({1: noisy})
    bench.open(1)
    bench.speak(1)
    assert bench.pcm(1) == windows(script)


def test_flush_hands_over_the_last_window_again_with_its_flag() -> None:
    bench = Bench({1: [*ids(35), STOP]})
    bench.open(1, flush=True)
    bench.speak(1)
    flags = [(bool(job.numbers["$first"]), bool(job.numbers["$last"])) for job in bench.snac.seen]
    assert flags == [(True, False), (False, False), (False, True)]
    assert bench.pcm(1)[-1] == ids(35)[-28:]


def test_requests_do_not_mix() -> None:
    bench = Bench({n: [*ids(28 + 7 * n, FIRST + 1000 * n), STOP] for n in range(1, 5)})
    for n in range(1, 5):
        bench.open(n)
        bench.walk(n, "SNAC", 1, "snac_chunk")
        bench.walk(n, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(3))})
    bench.turn()
    for n in range(1, 5):
        bench.walk(n, "LLM", 3, "decode", max_iters=99)
    bench.turns()
    for n in range(1, 5):
        assert bench.pcm(n) == windows(ids(28 + 7 * n, FIRST + 1000 * n))


def test_a_failing_node_fails_its_request_and_frees_it() -> None:
    bench = Bench({1: [*ids(60), STOP]})
    bench.snac.fail_at = 1
    bench.open(1)
    bench.walk(1, "SNAC", 1, "snac_chunk")
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(3))})
    bench.turns()
    bench.walk(1, "LLM", 3, "decode", max_iters=99)
    bench.turns()
    [failed] = bench.post.of(WorkFailed)
    assert failed.error.code == "engine_error" and "the node broke" in failed.error.message
    assert not bench.executor.requests and not bench.lm.open_handles and not bench.snac.open_handles


def test_the_compute_of_a_loop_that_fails_is_recorded() -> None:
    bench = Bench({1: [*ids(30), STOP]})
    bench.open(1)
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(5))})
    bench.turns()
    bench.walk(1, "LLM", 3, "decode", max_iters=99)
    for _ in range(5):
        bench.turn()
    job = bench.lm.seen[-1]
    bench.executor.take(StepResult(failed=[Failed(job=job, error=EngineError("the row broke"))]))
    spans = bench.executor.tracer.take((), 0.0)
    assert [(span.walk, round(span.spent_s, 3)) for span in spans if span.kind == "compute"] == [
        ("prefill", 0.001),
        ("decode", 0.005),
    ]


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_close_at_any_turn_leaves_nothing(after: int) -> None:
    bench = Bench({1: [*ids(60), STOP], 2: [*ids(35), STOP]})
    for handle in (1, 2):
        bench.open(handle)
        bench.walk(handle, "SNAC", 1, "snac_chunk")
        bench.walk(handle, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(3))})
    bench.turn()
    for handle in (1, 2):
        bench.walk(handle, "LLM", 3, "decode", max_iters=99)
    for _ in range(after):
        bench.turn()
    bench.executor.close(Handle(1))
    bench.executor.close(Handle(1))
    bench.turns()
    assert list(bench.executor.requests) == [2]
    assert bench.pcm(2) == windows(ids(35))
    bench.executor.close(Handle(2))
    assert not bench.executor._jobs.under_way and not bench.lm.open_handles


CLOSING = (
    "mstar_core.worker.telemetry.tracing.EdgeCounters.closed",
    "mstar_core.worker.telemetry.tracing.Tracer.transfers",
    "mstar_core.graph.runtime.walk_state.WalkState.cancel",
    "mstar_core.worker.job_table.Jobs.forget",
    "tests.fakes.runner.FakeRunner.close",
)
"""Every step that ends a request on a rank, as a fault point."""


@pytest.mark.parametrize("step", CLOSING, ids=[step.rpartition(".")[2] for step in CLOSING])
def test_a_step_of_a_cancel_that_fails_costs_no_other_request_and_no_other_step(
    step: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench({1: [*ids(60), STOP], 2: [*ids(35), STOP]})
    for handle in (1, 2):
        bench.open(handle)
        bench.walk(handle, "SNAC", 1, "snac_chunk")
        bench.walk(handle, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(3))})
    bench.turn()
    for handle in (1, 2):
        bench.walk(handle, "LLM", 3, "decode", max_iters=99)
    bench.turn()
    tried: list[str] = []
    with pytest.MonkeyPatch.context() as faults:
        for name in CLOSING:
            faults.setattr(name, fault(name, tried) if name == step else counted(name, tried))
        bench.executor.close(Handle(1))
    assert set(tried) == set(CLOSING), "the steps after the one that failed were taken too"
    assert f"{step.rpartition('.')[2]}" in caplog.text and "broken on purpose" in caplog.text
    bench.turns()
    assert list(bench.executor.requests) == [2] and bench.pcm(2) == windows(ids(35))
    bench.executor.close(Handle(2))
    assert not bench.executor.requests and 2 not in bench.lm.open_handles


def fault(name: str, tried: list[str]) -> Callable[..., None]:
    def fail(*_: object) -> None:
        tried.append(name)
        raise RuntimeError(f"{name} is broken on purpose")

    return fail


def counted(name: str, tried: list[str]) -> Callable[..., object]:
    """The step itself, noted."""
    step: Callable[..., object] = pkgutil.resolve_name(name)

    def take(*arguments: object) -> object:
        tried.append(name)
        return step(*arguments)

    return take


def test_a_stream_to_another_rank_is_one_message_a_step() -> None:
    homes = {"LLM": 0, "snac_decoder": 1}
    here = Bench({1: [*ids(35), STOP], 2: [*ids(28), STOP]}, nodes=("LLM",))
    there = Bench({}, nodes=("snac_decoder",), rank=1)
    for handle in (1, 2):
        here.open(handle, homes)
        there.open(handle, homes)
        there.walk(handle, "SNAC", 1, "snac_chunk")
        here.walk(handle, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(3))})
    here.turn()
    for handle in (1, 2):
        here.walk(handle, "LLM", 3, "decode", max_iters=99)
    here.turns()
    messages = here.post.of(StreamItems)
    assert all(max(Counter(m.handles).values()) == 1 for m in messages[1:])
    for message in messages:
        there.executor.stream_items(message)
    there.turns()
    assert there.pcm(1) == windows(ids(35)) and there.pcm(2) == windows(ids(28))


def test_an_item_out_of_order_fails_its_request_alone() -> None:
    bench = Bench({}, nodes=("snac_decoder",), rank=1)
    for handle in (1, 2):
        bench.open(handle, {"LLM": 0, "snac_decoder": 1})
        bench.walk(handle, "SNAC", 1, "snac_chunk")
    bench.executor.stream_items(StreamItems(stream="audio_ids", handles=[1, 2], index=[3, 0], ids=[FIRST, FIRST]))
    bench.outbox.flush()
    assert [m.handle for m in bench.post.of(WorkFailed)] == [1]
    assert list(bench.executor.requests) == [2]


@pytest.mark.parametrize("count", [0, 27, 28, 35, 60])
@pytest.mark.parametrize("flush", [False, True])
def test_a_stream_loop_equals_the_walk_state(count: int, flush: bool) -> None:
    """With a limit the loop runs through its WalkState, without one as a stream loop."""
    found = []
    for limit in (None, 10_000):
        bench = Bench({1: ids(count)})
        bench.open(1, flush=flush)
        bench.walk(1, "SNAC", 1, "snac_chunk", max_iters=limit)
        state = bench.executor.requests[Handle(1)].active["SNAC"]
        assert isinstance(state.state, StreamWalk) == (limit is None)
        for value in ids(count):
            stream = ORPHEUS.streams[0]
            bench.executor._streams.put_id(bench.executor.requests[Handle(1)], stream, value)
            bench.turn()
        bench.executor.end_stream(EndStream(handle=1, stream="audio_ids", total=count))
        bench.turns()
        outputs = [(item.seq, item.port, item.meta) for message in bench.post.of(Outputs) for item in message.items]
        ends = [(end.reason, end.counts, end.emitted, end.streamed) for end in bench.post.of(WalkDone)]
        jobs = [
            (job.handle, sorted({**{k: v.tolist() for k, v in job.inputs.items()}, **job.numbers}.items()))
            for job in bench.snac.seen
        ]
        found.append((outputs, bench.pcm(1), ends, jobs, bench.executor._jobs.under_way))
    assert found[0] == found[1]
    assert found[0][2][0][0] == "done"


def test_the_salt_of_a_request_is_part_of_its_cache_keys() -> None:
    seeds = []
    for salt in (b"", b"a", b"b"):
        bench = Bench({1: [1, 2, 3]})
        opening = OpenRequest(
            handle=1, params={}, seed=1, homes={"LLM": 0}, max_tokens=100, outputs=["audio"], salt=salt
        )
        bench.executor.open(opening)
        bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": inline(np.arange(5))})
        seeds.append(bench.lm.seen[0].tokens_hash_seed)
    assert seeds == [b"ids", b"aids", b"bids"], "without keys the cache is as it was"


def test_a_request_of_a_session_leases_what_it_leaves_until_the_session_ends() -> None:
    bench = Bench({})
    for handle, session in ((1, ""), (2, "talk")):
        homes = {"LLM": 0, "snac_decoder": 0}
        bench.executor.open(
            OpenRequest(handle=handle, params={}, seed=1, homes=homes, max_tokens=9, session=session, lease_s=60.0)
        )
    assert [runner.leases for runner in bench.runners.values()] == [{"talk": (2, 60.0)}] * 2
    bench.executor.end_session("talk")
    assert [runner.leases for runner in bench.runners.values()] == [{}, {}]
