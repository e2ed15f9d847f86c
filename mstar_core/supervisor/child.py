"""Child processes of the supervisor: kinds, spawn, signals, start-up progress."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from mstar_core.config.deployment import DeploymentSpec, Plan, RankPlan
from mstar_core.host.private_files import write_private
from mstar_core.host.run_dir import RunDirectory
from mstar_core.messages.life import Phase
from mstar_core.messages.names import follower_name, worker_name
from mstar_core.supervisor.clock_shift import ClockShift
from mstar_core.supervisor.log_file import LogFile
from mstar_core.supervisor.spawner import ChildProcess, Spawner

BEAT_GAP_S: Final = 3.0
"""Time without a heartbeat after which a process does not count as running all the time."""

NO_FDS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildKind:
    """The program of a child. name: of its mailbox; module: run with `python -m`; host: empty for the supervisor's.

    has_standby: whether a standby process may take its place, see `supervisor/standby.py`.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    has_standby: bool = False
    host: str = ""


@dataclass(slots=True)
class Child:
    """The current incarnation of a child. Owned by the supervisor. state: spawned, known, ready or ended.

    ends_with_group: another member of its tensor-parallel group has died. attending: the task that waits for its end.
    hung: why the watchdog killed it, empty if it did not. stuck_s: seconds with ready work and no step, at its last
    heartbeat. last_beat: time of its last message. beat_at: of its last heartbeat; beats_since: of the first one since
    which none was missing. breaks: times of its restarts for broken links. last_computed: when it last used a CPU core;
    computed_s: the CPU seconds of its main thread then.
    """

    kind: ChildKind
    log: LogFile
    incarnation: int = 0
    process: ChildProcess | None = None
    state: str = "ended"
    endpoint: str = ""
    fd_endpoint: str = ""
    remote_endpoint: str = ""
    blob_endpoint: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    phase: str = ""
    phase_done: int = 0
    phase_total: int = 0
    detail: str = ""
    last_progress: float = 0.0
    last_beat: float = 0.0
    beat_at: float = 0.0
    beats_since: float = 0.0
    breaks: list[float] = field(default_factory=list)
    last_steps: int = -1
    last_step_change: float = 0.0
    stuck_s: float = 0.0
    last_computed: float = 0.0
    computed_s: float = 0.0
    has_long_step: bool = False
    started: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    restarts: list[float] = field(default_factory=list)
    ending: bool = False
    renewing: bool = False
    ends_with_group: bool = False
    hung: str = ""
    attending: asyncio.Task[None] | None = None
    clock: ClockShift = field(default_factory=ClockShift)

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def host(self) -> str:
        """Name of its host, empty for the supervisor's."""
        return self.kind.host

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def is_ready(self) -> bool:
        """Whether it serves. `state` is the last one of a process whose death has not been handled yet."""
        return self.state == "ready" and self.is_running

    @property
    def is_suspended(self) -> bool:
        """Whether its process is stopped by a signal or a debugger."""
        return self.process is not None and self.process.is_suspended()

    async def spawn(
        self,
        spawner: Spawner,
        inherited: Mapping[str, int] = NO_FDS,
        extra: Sequence[str] = (),
        *,
        takes_standby: bool = False,
    ) -> None:
        """Start the next incarnation. Raises OSError or MstarError if there is no process.

        inherited: descriptors by the name of the option that tells the child their numbers. extra: further arguments.
        takes_standby: whether a standby process may become it.
        """
        self.incarnation += 1
        self.state, self.endpoint, self.phase, self.facts = "spawned", "", "spawn", {}
        self.started = self.last_progress = self.last_beat = self.last_step_change = time.monotonic()
        self.phases_s, self.hung = {}, ""
        self.last_steps, self.has_long_step = -1, False
        self.beat_at = self.beats_since = 0.0
        self.stuck_s = self.computed_s = self.last_computed = 0.0
        self.remote_endpoint = self.blob_endpoint = ""
        self.clock = ClockShift()
        options = (text for name, fd in inherited.items() for text in (f"--{name}", str(fd)))
        identity = ("--incarnation", str(self.incarnation), "--supervisor", spawner.endpoint)
        arguments = (*identity, *self.kind.arguments, *options, *extra)
        fds = tuple(inherited.values())
        self.process = await spawner.start(
            self.name, self.kind.module, arguments, inherited=fds, takes_standby=takes_standby
        )

    async def watch(self) -> int:
        """Pump the output; return the exit status (negative: signal) once the child and its group have ended."""
        return 0 if self.process is None else await self.process.watch(self.log.write)

    async def wait_exit(self) -> None:
        """Wait for the end of the process."""
        if self.process is not None:
            await self.process.exited.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, if it still exists."""
        if self.process is not None:
            self.process.signal(number)

    def extend_deadlines(self, seconds: float) -> None:
        """Exclude these seconds from the limits on silence, progress and steps."""
        self.last_progress += seconds
        self.last_beat += seconds
        self.last_step_change += seconds
        self.last_computed += seconds

    def beat(self, now: float) -> None:
        """Note a heartbeat."""
        if now - self.beat_at > BEAT_GAP_S:
            self.beats_since = now
        self.beat_at = now

    def has_beaten(self, now: float, seconds: float) -> bool:
        """Return whether its heartbeats have come without a gap for so long: its loop runs and sends to its peers."""
        return now - self.beat_at <= BEAT_GAP_S and now - self.beats_since >= seconds

    def advance(self, phase: Phase, now: float) -> float:
        """Note the progress of a start. Returns the seconds of the phase that ended with it, 0 if none did."""
        took = self._enter_phase(phase.phase, now)
        if phase.done > self.phase_done:
            self.last_progress = now
        self.phase_done, self.phase_total, self.detail = phase.done, phase.total, phase.detail
        return took

    def _enter_phase(self, phase: str, now: float) -> float:
        """Add the time since the last change of phase to the old phase, and return it."""
        if phase == self.phase:
            return 0.0
        begun = self.started + sum(self.phases_s.values())
        took = max(0.0, now - begun)
        self.phases_s[self.phase] = self.phases_s.get(self.phase, 0.0) + took
        self.phase = phase
        self.phase_done = self.phase_total = 0
        self.last_progress = now
        return took


FETCH: Final = ChildKind(name="weights", module="mstar_core.weights.fetch")
STANDBY: Final = ChildKind(
    name="standby", module="mstar_core.process.standby", arguments=("mstar_core.worker.start.preload:preload",)
)


def standby_kind(spec: DeploymentSpec) -> ChildKind | None:
    """Return the standby process of a deployment, None if it has none: by default beside GPUs only.

    A tensor-parallel group restarts as a whole, for which one process is not enough.
    """
    alone = [rank for rank in spec.plan.ranks if not rank.host and spec.plan.group_of(rank.rank) is None]
    has_gpu = any(rank.device != "cpu" for rank in alone)
    return STANDBY if alone and (has_gpu if spec.standby is None else spec.standby) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Intervals and limits of the supervisor in seconds.

    ping_s: between pings; ten missed ones end a child. watch_s: between checks of progress. publish_s: between updates
    of the hub while it is watched, unwatched_s: otherwise. stop_s: for children to end by themselves. backoff_s: before
    the first, second ... restart within window_s. A child that was ready, and the api, restarts at once the first time,
    and whenever it has been ready and lived for lived_s. A deployment is unhealthy after restarts_max of one child
    within window_s. stacks_s: for a stuck child to write its stacks. cause_s: for other children to die of the same
    cause. standby_s: from ready to the start of a standby process, and standby_retry_s from the end of one that was not
    used. standby_answer_s: for one to take the place of a child; it waits for that only, and a new process takes longer
    than a slow answer. host_silence_s: silence of an agent after which its host is lost; host_retry_s: before the
    second, third ... attempt to replace it, and before the second, third ... restart for a broken link.
    """

    ping_s: float = 1.0
    watch_s: float = 1.0
    publish_s: float = 0.1
    unwatched_s: float = 2.0
    stop_s: float = 10.0
    backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    window_s: float = 600.0
    lived_s: float = 60.0
    restarts_max: int = 5
    stacks_s: float = 1.0
    cause_s: float = 0.3
    standby_s: float = 5.0
    standby_retry_s: float = 60.0
    standby_answer_s: float = 5.0
    host_silence_s: float = 10.0
    host_retry_s: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)


DEFAULT_PACE: Final = Pace()

Kinds = Callable[[DeploymentSpec], Sequence[ChildKind]]


def child_kinds(spec: DeploymentSpec) -> list[ChildKind]:
    """Return the child that fetches the weights and ends, then those that stay."""
    workers = [
        ChildKind(
            name=worker_name(r.rank),
            module="mstar_core.worker",
            arguments=("--rank", str(r.rank)),
            has_standby=spec.plan.group_of(r.rank) is None and not r.host,
            host=r.host,
        )
        for r in spec.plan.ranks
        if r.nodes
    ]
    workers += [
        ChildKind(
            name=follower_name(r.rank),
            module="mstar_core.worker.follower",
            arguments=("--rank", str(r.rank)),
            host=r.host,
        )
        for r in spec.plan.ranks
        if r.follows
    ]
    return [
        FETCH,
        ChildKind(name="conductor", module="mstar_core.conductor"),
        *workers,
        ChildKind(name="api", module="mstar_core.api"),
    ]


def host_fact(child: Child) -> dict[str, str]:
    """Return the host of a child for its events; nothing on the supervisor's."""
    return {"host": child.host} if child.host else {}


def group_members(plan: Plan, name: str) -> tuple[str, ...]:
    """Return the names of the tensor-parallel group that a process belongs to, the leader first; empty without one."""
    for group in plan.groups:
        names = (worker_name(group.leader), *(follower_name(rank) for rank in group.ranks[1:]))
        if name in names:
            return names
    return ()


def plan_facts(spec: DeploymentSpec) -> dict[str, Any]:
    """Return the facts of the plan event: ranks (`0 cpu: LLM, snac_decoder`), bytes needed and free."""
    ranks = [f"{rank.rank} {rank.device}: {_held(rank)}" for rank in spec.plan.ranks]
    sizes = {"needed_bytes": spec.needed_bytes, "free_bytes": spec.free_bytes}
    return {"ranks": ranks, **{name: size for name, size in sizes.items() if size}}


def _held(rank: RankPlan) -> str:
    followed = [f"{node} (follows)" for node in rank.follows]
    return ", ".join([*rank.nodes, *followed])


def write_spec(run: RunDirectory, spec: DeploymentSpec) -> None:
    """Write spec.json, readable by the owner alone because it may contain API keys."""
    write_private(run.spec, spec.encode())
