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
                nodes, adapters = follower_nodes(spec, plan, group, life)
                keep_start()
                life.phase("ready")
                Follower(
                    mailbox=mailbox, life=life, receiver=receiver, nodes=nodes, index=place.index, adapters=adapters
                ).run()


def follower_nodes(
    spec: DeploymentSpec, plan: GroupPlan, group: RankGroup, life: ChildLife
) -> tuple[dict[str, NodeFollower | StatelessFollower], RankAdapters]:
    """Load this rank's share of the group's nodes and of LoRA adapters, in lockstep with the leader."""
    model = bound_model(spec.plugin, spec.model, spec.folder, spec.model_kwargs)
    spec = spec.fitted(model)
    rank = rank_plan(spec, group.place.rank)
    nodes = [model.node(name) for name in rank.follows]
    _, runners = build_nodes(spec, model, rank, life, group.device, nodes, group, frozenset(plan.nodes))
    adapters = RankAdapters(banks_of(runners))
    adapters.load_all(spec.adapters, is_first=life.incarnation == 1)
    followers: dict[str, NodeFollower | StatelessFollower] = {
        name: runner.follower(group.collectives)
        for name, runner in runners.items()
        if isinstance(runner, KVCacheEngine | StatelessEngine)
    }
    return followers, adapters


@dataclass(slots=True, kw_only=True)
class Follower:
    """The loop of a follower. Owned by `main`; one thread."""

    mailbox: Mailbox
    life: ChildLife
    receiver: PlanReceiver
    nodes: Mapping[str, NodeFollower | StatelessFollower]
    index: int
    adapters: RankAdapters = field(default_factory=RankAdapters)
    has_stopped: bool = False
    next_life: float = 0.0
    next_report: float = 0.0
    reported: int = 0

    def run(self) -> None:
        """Carry out plans until the leader or the supervisor ends the group."""
        while self.life.stop_reason is None and not self.has_stopped:
            self.turn()
        self.adapters.close()
        log.info("follower ends: %s", self.life.stop_reason or "the leader stopped")

    def turn(self) -> None:
        """Wait for a frame and carry it out; answer the supervisor in between."""
        frame = self.receiver.receive(WAIT_S)
        for plan in frame.plans if frame is not None else ():
            if isinstance(plan, StopPlans):
                self.has_stopped = True
                return
            try:
                value = self.nodes[plan.node].run(plan, self.receiver.shared)
            except Exception as error:
                kind = type(plan).__name__
                raise self.receiver.failed(f"{kind} of node {plan.node}: {type(error).__name__}: {error}") from error
            if value is not None and isinstance(plan, Compare):
                self.receiver.answer(Checksum(index=self.index, node=plan.node, number=plan.number, value=value))
        now = time.monotonic()
        if now >= self.next_life:
            self.next_life = now + LIFE_S
            for item in self.mailbox.drain():
                if isinstance(item, Malformed):
                    log.warning("a message could not be read: %s", item.error)
                elif self.life.accepts(item):
                    for message in self.life.receive(item):
                        self.take(message)
            if self.adapters.is_reading:
                self.adapters.finish(self.life.answer)
            self.life.beat(now, steps=self.receiver.sequence)
        if now >= self.next_report and self.receiver.sequence != self.reported:
            self.next_report, self.reported = now + REPORT_S, self.receiver.sequence
            self.life.telemetry({"plans": self.reported, **device_memory()})

    def take(self, message: Message) -> None:
        """Carry out a request about an adapter. No step uses it yet, or none any more."""
        match message:
            case LoadAdapter():
                self.adapters.begin(message)
            case UnloadAdapter():
                self.adapters.unload(message, self.life.answer)


if __name__ == "__main__":
    main()
