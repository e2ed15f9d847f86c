"""A worker whose conductor has died: its late commands open nothing, and nothing that arrives for them stays lent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mstar_core.messages.flow import StreamTensor
from mstar_core.messages.life import PeerDown
from mstar_core.messages.wire import WIRE_VERSION, Envelope, Message
from mstar_core.messages.work import OpenRequest, RunWalk, RunWalks
from mstar_core.process.life import ChildLife
from mstar_core.worker.loop import Worker
from tests.worker.test_early_messages import lent
from tests.worker.test_executor import Bench, InlineTransport

DOWN = PeerDown(name="conductor", incarnation=1, cause="killed")


class Box:
    """A mailbox that holds these messages: (sender, incarnation, message)."""

    def __init__(self, *messages: tuple[str, int, Message]) -> None:
        self._waiting = [Envelope(WIRE_VERSION, sender, number, message) for sender, number, message in messages]

    def drain(self) -> list[Envelope]:
        taken, self._waiting = self._waiting, []
        return taken


def worker(bench: Bench, box: Box, folder: Path) -> Worker:
    post = SimpleNamespace(connect=lambda *_: True, disconnect=lambda *_: None, send=lambda *_: True)
    spec = SimpleNamespace(ipc_dir=folder, run_dir=str(folder), on_host="")
    life = ChildLife("worker-0", 1, cast(Any, spec), cast(Any, post))
    steps = SimpleNamespace(count=0, collected=0, statistics={})
    return Worker(
        mailbox=cast(Any, box),
        transport=cast(Any, InlineTransport()),
        life=life,
        executor=bench.executor,
        outbox=bench.outbox,
        runners=bench.runners,
        steps=cast(Any, steps),
    )


def walks(handle: int) -> RunWalks:
    opens = OpenRequest(
        handle=handle, params={}, seed=1, homes={"LLM": 0, "snac_decoder": 0}, max_tokens=100, outputs=["audio"]
    )
    return RunWalks(handle=handle, partition="SNAC", runs=[RunWalk(run=1, walk="snac_chunk")], opens=opens)


def stream_item(handle: int, slot: int) -> StreamTensor:
    return StreamTensor(stream="audio_ids", handle=handle, index=0, ref=lent(slot))


def test_walks_of_a_dead_conductor_open_nothing(tmp_path: Path) -> None:
    bench = Bench({})
    box = Box(("conductor", 1, walks(1)), ("supervisor", 0, DOWN), ("conductor", 1, walks(2)))
    worker(bench, box, tmp_path).drain()
    assert not bench.executor.requests
    assert not any(runner.pressure().ready for runner in bench.runners.values())


def test_walks_of_the_next_conductor_survive_a_late_announcement(tmp_path: Path) -> None:
    bench = Bench({})
    box = Box(("conductor", 1, walks(1)), ("conductor", 2, walks(2)), ("supervisor", 0, DOWN))
    worker(bench, box, tmp_path).drain()
    assert list(bench.executor.requests) == [2]


def test_tensors_for_requests_of_a_dead_conductor_are_returned(tmp_path: Path) -> None:
    bench = Bench({})
    box = Box(
        ("conductor", 1, walks(1)),
        ("worker-1", 1, stream_item(2, 20)),
        ("supervisor", 0, DOWN),
        ("conductor", 1, walks(3)),
        *(("worker-1", 1, stream_item(handle, handle * 10)) for handle in (1, 2, 3)),
    )
    made = worker(bench, box, tmp_path)
    made.drain()
    assert sorted(ref.slot for ref in made.early.abandoned) == [10, 20, 20, 30]  # type: ignore[union-attr]
    assert made.early.take(1) == made.early.take(2) == made.early.take(3) == []
