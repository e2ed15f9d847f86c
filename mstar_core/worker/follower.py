"""Process of a follower: holds its share of a group's nodes and carries out the leader's plans, in order.

It knows no requests. It ends with its leader, and the supervisor starts the whole group again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mstar_core.engine.group.link import PlanReceiver
from mstar_core.engine.group.plans import Checksum, Compare, StopPlans
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.errors import ConfigError
from mstar_core.messages.adapters import LoadAdapter, UnloadAdapter
from mstar_core.messages.sleep import Sleep, Wake
from mstar_core.parallel.groups import RankGroup
from mstar_core.plugin.loader import bound_model
from mstar_core.process.life import ChildLife, start_child
from mstar_core.process.sockets import ChildSockets
from mstar_core.process.system import keep_freed_memory, keep_start, set_exact_timers
from mstar_core.transport import Mailbox, Malformed
from mstar_core.worker.adapters import RankAdapters, banks_of
from mstar_core.worker.main import ends_with_group, rank_plan
from mstar_core.worker.report import device_memory
from mstar_core.worker.start.build import build_nodes, open_device
from mstar_core.worker.start.group import join_place
from mstar_core.worker.start.sleep import hold_memory, rank_sleep, sleeper_of
from mstar_core.worker.state.sleep import RankSleep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mstar_core.config.deployment import DeploymentSpec, GroupPlan
    from mstar_core.engine.kv.follower import NodeFollower
    from mstar_core.engine.stateless.group import StatelessFollower
    from mstar_core.messages.wire import Message

log = logging.getLogger(__name__)

WAIT_S: Final = 0.1
"""Longest wait for plans between two looks at the mailbox."""

REPORT_S: Final = 0.5
"""Shortest interval of telemetry."""

LIFE_S: Final = 0.05
"""Interval of heartbeats and of looks at the mailbox while plans arrive."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: `python -m mstar_core.worker.follower SPEC --rank R --incarnation N --supervisor ENDPOINT`."""
    arguments = start_child("follower", argv)
    spec, number = arguments.spec, arguments.rank
    set_exact_timers()
    keep_freed_memory()
    with ChildSockets(arguments) as sockets:
        life = sockets.life
        with life.guarded():
            plan = spec.plan.group_of(number)
            if plan is None:
                raise ConfigError(f"rank {number} follows in no group", f"{len(spec.plan.groups)} groups are planned")
            device = open_device(rank_plan(spec, number), life)
            place = join_place(arguments, plan, life)
            mailbox = sockets.open_mailbox()
            with PlanReceiver(place) as receiver, RankGroup(place, device) as group, ends_with_group():
                nodes, adapters, sleep = follower_nodes(spec, plan, group, life)
                keep_start()
                life.phase("ready")
                Follower(
                    mailbox=mailbox,
                    life=life,
                    receiver=receiver,
                    nodes=nodes,
                    index=place.index,
                    adapters=adapters,
                    sleep=sleep,
                ).run()


def follower_nodes(
    spec: DeploymentSpec, plan: GroupPlan, group: RankGroup, life: ChildLife
) -> tuple[dict[str, NodeFollower | StatelessFollower], RankAdapters, RankSleep]:
    """Load this rank's share of the group's nodes and of LoRA adapters, in lockstep with the leader."""
    model = bound_model(spec.plugin, spec.model, spec.folder, spec.model_kwargs)
    spec = spec.fitted(model)
    rank = rank_plan(spec, group.place.rank)
    nodes = [model.node(name) for name in rank.follows]
    _, runners = build_nodes(spec, model, rank, life, group.device, nodes, group, frozenset(plan.nodes))
    sleeper = sleeper_of(group.device, spec)
    hold_memory(sleeper, runners)
    adapters = RankAdapters(banks_of(runners))
    adapters.load_all(spec.adapters, is_first=life.incarnation == 1)
    followers: dict[str, NodeFollower | StatelessFollower] = {
        name: runner.follower(group.collectives)
        for name, runner in runners.items()
        if isinstance(runner, KVCacheEngine | StatelessEngine)
    }
    sleep = rank_sleep(
        spec,
        model,
        rank,
        runners,
        group.device,
        sleeper,
        life.answer,
        group=group,
        shared=frozenset(plan.nodes),
    )
    return followers, adapters, sleep


@dataclass(slots=True, kw_only=True)
class Follower:
    """The loop of a follower. Owned by `main`; one thread."""

    mailbox: Mailbox
    life: ChildLife
    receiver: PlanReceiver
    nodes: Mapping[str, NodeFollower | StatelessFollower]
    index: int
    adapters: RankAdapters = field(default_factory=RankAdapters)
    sleep: RankSleep = field(default_factory=RankSleep)
    has_stopped: bool = False
    next_life: float = 0.0
    next_report: float = 0.0
    reported: int = 0

    def run(self) -> None:
        """Carry out plans until the leader or the supervisor ends the group."""
        while self.life.stop_reason is None and not self.has_stopped:
            self.turn()
        self.adapters.close()
        self.sleep.close()
        log.info("follower ends: %s", self.life.stop_reason or "the leader stopped")

    def turn(self) -> None:
        """Wait for a frame and carry it out; answer the supervisor in between."""
        frame = self.receiver.receive(WAIT_S)
        for plan in frame.plans if frame is not None else ():
            if isinstance(plan, StopPlans):
                self.has_stopped = True
                return
            self.await_wake(plan.node)
            if self.life.stop_reason is not None:
                return
            try:
                value = self.nodes[plan.node].run(plan, self.receiver.shared)
            except Exception as error:
                kind = type(plan).__name__
                raise self.receiver.failed(f"{kind} of node {plan.node}: {type(error).__name__}: {error}") from error
            if value is not None and isinstance(plan, Compare):
                self.receiver.answer(Checksum(index=self.index, node=plan.node, number=plan.number, value=value))
        now = time.monotonic()
        self.attend(now)
        if now >= self.next_report and self.receiver.sequence != self.reported:
            self.next_report, self.reported = now + REPORT_S, self.receiver.sequence
            self.life.telemetry({"plans": self.reported, **device_memory(self.sleep.placed_bytes)})

    def attend(self, now: float) -> None:
        """Handle messages and answer the supervisor, unless that was done a moment ago."""
        if now < self.next_life:
            return
        self.next_life = now + LIFE_S
        for item in self.mailbox.drain():
            if isinstance(item, Malformed):
                log.warning("a message could not be read: %s", item.error)
            elif self.life.accepts(item):
                for message in self.life.receive(item):
                    self.take(message)
        if self.adapters.is_reading:
            self.adapters.finish(self.life.answer)
        if self.sleep.is_working:
            self.sleep.turn()
        self.life.beat(now, steps=self.receiver.sequence)

    def await_wake(self, node: str) -> None:
        """Wait until a node is awake: the leader's plan may come before this process has its memory again."""
        while node in self.sleep.asleep and self.life.stop_reason is None:
            self.mailbox.wait(LIFE_S)
            self.attend(time.monotonic())

    def take(self, message: Message) -> None:
        """Carry out an order about an adapter or a sleep. No step uses it yet, or none any more."""
        match message:
            case Sleep() | Wake():
                self.sleep.begin(message, lambda names: [])
            case LoadAdapter():
                self.adapters.begin(message)
            case UnloadAdapter():
                self.adapters.unload(message, self.life.answer)


if __name__ == "__main__":
    main()
