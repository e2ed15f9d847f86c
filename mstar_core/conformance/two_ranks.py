"""Two ranks of a tensor-parallel group in one process: a leader in a LocalRuntime and a follower on a thread."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mstar_core.conformance.nodes import BuiltNode, RuntimeSettings, build_nodes, make_runners
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.engine.group.link import GroupEnded, PlanReceiver, PlanSender
from mstar_core.engine.group.plans import Checksum, Compare, Plan, Step, StopPlans
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.parallel.groups import GroupPlace
from mstar_core.parallel.shards import Shard
from mstar_core.plugin.model import ModelContext
from mstar_core.plugin.spec import ModelSpec
from mstar_core.worker.start.build import compute_dtype, load_nodes, local_node
from mstar_core.worker.state.walks import resident_loops

Engine = KVCacheEngine | StatelessEngine
CPU: Final = torch.device("cpu")
WAIT_S: Final = 120.0
"""Longest wait of a thread for the other one. It fails at once if that one does."""


class ThreadMeeting:
    """The place where the threads of a group exchange values. error: of the thread that has left it."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Tensor | None] = [None] * size
        self.error: BaseException | None = None

    def exchange(self, index: int, value: Tensor) -> list[Tensor]:
        self.values[index] = value
        try:
            self.barrier.wait(WAIT_S)
            found = [each for each in self.values if each is not None]
            self.barrier.wait(WAIT_S)
        except threading.BrokenBarrierError as error:
            raise error from self.error
        return found


class ThreadCollectives:
    """Collectives of one rank; the sum has the order of the ranks."""

    def __init__(self, meeting: ThreadMeeting, index: int) -> None:
        self._meeting, self._index = meeting, index
        self.count = 0

    def all_reduce(self, value: Tensor) -> Tensor:
        self.count += 1
        first, *rest = self._meeting.exchange(self._index, value)
        total = first.clone()
        for each in rest:
            total += each
        return total

    def all_gather(self, value: Tensor) -> Tensor:
        self.count += 1
        return torch.cat(self._meeting.exchange(self._index, value), dim=-1)

    def exchange(self, value: Tensor) -> Tensor:
        self.count += 1
        return torch.stack([each[self._index] for each in self._meeting.exchange(self._index, value)])

    def broadcast(self, value: Tensor) -> None:
        raise AssertionError("on the CPU, values travel in plans")


def kinds_of(plan: Plan) -> list[str]:
    """Return the name of a plan's type, and of the changes of device state in it."""
    return [
        type(plan).__name__,
        *(type(each).__name__ for each in (plan.plan.updates if isinstance(plan, Step) else ())),
    ]


class FollowerThread:
    """The loop of a follower. error: what ended it early. is_skewed: make its last ids differ from the leader's."""

    def __init__(self, receiver: PlanReceiver, engines: Mapping[str, Engine], meeting: ThreadMeeting) -> None:
        collectives: Any = ThreadCollectives(meeting, 1)
        self.engines = engines
        self._nodes = {name: engine.follower(collectives) for name, engine in engines.items()}
        self._receiver, self._meeting = receiver, meeting
        self.error: BaseException | None = None
        self.kinds: list[str] = []
        self.is_skewed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                frame = self._receiver.receive(WAIT_S)
                for plan in frame.plans if frame is not None else ():
                    self.kinds += kinds_of(plan)
                    if isinstance(plan, StopPlans):
                        return
                    if self.is_skewed and isinstance(plan, Compare):
                        node: Any = self._nodes[plan.node]
                        node._slots.last[0] += 1
                    value = self._nodes[plan.node].run(plan, self._receiver.shared)
                    if value is not None and isinstance(plan, Compare):
                        self._receiver.answer(Checksum(index=1, node=plan.node, number=plan.number, value=value))
        except (Exception, GroupEnded) as error:  # noqa: BLE001 reported by the test
            self.error = self._meeting.error = error
            self._meeting.barrier.abort()


@contextmanager
def linked(folder: Path) -> Iterator[tuple[PlanSender, PlanReceiver]]:
    """Connect a leader and a follower of two ranks."""
    places = [GroupPlace(ranks=(0, 1), rank=rank, epoch=1, folder=folder) for rank in (0, 1)]
    with PlanSender(places[0]) as sender, PlanReceiver(places[1]) as receiver:
        sender.accept()
        yield sender, receiver


@contextmanager
def led(
    leaders: Mapping[str, Engine], followers: Mapping[str, Engine], meeting: ThreadMeeting
) -> Iterator[FollowerThread]:
    """Let engines lead followers during the block, and check that the follower carried out every plan."""
    with tempfile.TemporaryDirectory(prefix="tp-", dir="/tmp") as folder, linked(Path(folder)) as (sender, receiver):
        thread = FollowerThread(receiver, followers, meeting)
        for engine in leaders.values():
            lead: Any = ThreadCollectives(meeting, 0)
            engine.lead(sender, lead, 2)
        try:
            yield thread
        except threading.BrokenBarrierError as error:
            raise thread.error or error from error
        sender.publish(StopPlans())
        thread.thread.join(WAIT_S)
        if thread.error is not None:
            raise thread.error


def shards(meeting: ThreadMeeting) -> tuple[Shard, Shard]:
    """Return the places of both ranks."""
    first, second = (Shard(index=i, size=2, collectives=ThreadCollectives(meeting, i)) for i in range(2))
    return first, second


@contextmanager
def parallel_runtime(
    spec: ModelSpec, folder: Path, groups: Sequence[Sequence[str]], settings: RuntimeSettings | None = None, **more: Any
) -> Iterator[tuple[LocalRuntime, list[FollowerThread]]]:
    """Make a runtime in which two ranks compute the nodes of each group. Yields it with the follower of each group."""
    meetings = [ThreadMeeting() for _ in groups]
    sides = [
        tuple(built(spec, folder, nodes, shard) for shard in shards(meeting))
        for nodes, meeting in zip(groups, meetings, strict=True)
    ]
    shared = {name for nodes in groups for name in nodes}
    others = build_nodes(replace(spec, nodes=tuple(node for node in spec.nodes if node.name not in shared)), folder)
    leaders = {name: node for leader, _ in sides for name, node in leader.items()}
    runtime = LocalRuntime(spec, folder, settings, built={**others, **leaders}, **more)
    mine = {name: runner for worker in runtime.workers for name, runner in worker.runners.items()}
    with ExitStack() as stack:
        threads = []
        for nodes, meeting, (_, follower) in zip(groups, meetings, sides, strict=True):
            theirs = make_runners(follower, nodes, runtime.settings, runtime.clock, None)
            threads.append(stack.enter_context(led(engines(mine, nodes), engines(theirs, nodes), meeting)))
        yield runtime, threads


def engines(runners: Mapping[str, NodeRunner], nodes: Sequence[str]) -> dict[str, Engine]:
    """Return the engines of these nodes."""
    return {name: runner for name in nodes if isinstance(runner := runners[name], KVCacheEngine | StatelessEngine)}


def built(spec: ModelSpec, folder: Path, nodes: Sequence[str], shard: Shard) -> dict[str, BuiltNode]:
    """Build one rank's share of nodes. The ranks load one after the other, so collectives must not be needed."""
    context = ModelContext(
        spec=spec,
        folder=folder,
        device=CPU,
        dtype=compute_dtype(None, CPU),
        model_kwargs=spec.model_kwargs,
        shard=shard,
    )
    loops = resident_loops(spec)
    chosen = [local_node(spec.node(name), shard.size) for name in nodes]
    return {
        node.name: BuiltNode(node=node, module=module, vocab=vocab, loop=loops.get(node.name))
        for node, module, vocab in load_nodes(spec, context, chosen)
    }
