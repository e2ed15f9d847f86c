"""State publisher: turns telemetry of children and observations of the supervisor into the hub's state.

Every displayed figure is computed here, once: rates from counters, quantiles, shares, the bottleneck, metrics.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from mstar_core.host.readings.gpus import GpuReader, device_keys
from mstar_core.host.readings.loads import HostLoads
from mstar_core.host.readings.processes import NO_LOAD, OomKills, ProcessLoad, ProcessLoads, host_memory_bytes
from mstar_core.messages.life import Phase, Telemetry
from mstar_core.messages.names import API, follower_name, process_rank, rank_of, worker_name
from mstar_core.observe.frames import (
    GRAPH_FACT,
    ChildStatus,
    DeploymentStatus,
    EdgeStatus,
    Event,
    GpuStatus,
    GraphView,
    HostStatus,
    NodeStatus,
    RankStatus,
    SessionStatus,
)
from mstar_core.observe.hub import TelemetryHub
from mstar_core.observe.metrics import FAMILIES, exposition
from mstar_core.observe.rates import Rate
from mstar_core.observe.receivers import receiver
from mstar_core.observe.request_log import RequestLog
from mstar_core.supervisor.deaths import Circumstances
from mstar_core.supervisor.telemetry.metric_samples import shared_samples, socket_samples

if TYPE_CHECKING:
    from mstar_core.config.deployment import DeploymentSpec
    from mstar_core.messages.hosts import HostReading
    from mstar_core.messages.telemetry import EdgeNews, MetricSample, SessionNews
    from mstar_core.supervisor.child import Child as Process
    from mstar_core.supervisor.hosts.hosts import OtherHosts
    from mstar_core.supervisor.operations.sleep import Sleeping
    from mstar_core.supervisor.standby import Standby

PARTS_S: Final = 0.25
"""Interval between updates of nodes, edges, ranks and the head. Each refresh updates requests."""

LOADS_S: Final = 1.0
BUSY: Final = 0.5
"""Least share of time in steps of a node that is marked as the bottleneck."""

SUPERVISOR: Final = "supervisor"
STANDBY: Final = "standby"
ASLEEP: Final = "sleeping"


class PublishedSupervisor(Protocol):
    """The part of the supervisor that is read here."""

    spec: DeploymentSpec
    state: str
    reason: str
    started: float
    started_at: float
    ready_s: float | None
    restarts: int
    cause: dict[str, Any] | None
    failures: list[dict[str, Any]]
    values: dict[str, float]
    children: dict[str, Process]
    standby: Standby
    hosts: OtherHosts
    sleep: Sleeping

    @property
    def cordoned(self) -> frozenset[int]:
        """Ranks whose replicas get no new requests."""


class StatePublisher:
    """Keeps the hub up to date. Owned by the supervisor, which calls `refresh` at the intervals of its pace.

    Those that read the state without watching it call `refresh` first.

    `take`, `part` and `phase` handle messages and the end of children.
    """

    def __init__(self, view: PublishedSupervisor, hub: TelemetryHub, gpus: GpuReader) -> None:
        self.hub = hub
        self.requests = RequestLog(view.spec.model, lambda rank: view.spec.host_of(rank))
        self.weights: dict[str, int] = {}
        self._api_samples: dict[tuple[str, tuple[str, ...]], MetricSample] = {}
        self._view = view
        self._gpus = gpus
        self._processes = ProcessLoads()
        self._host_bytes = host_memory_bytes()
        self._resident: dict[str, int] = {}
        self._kills = OomKills()
        self._loads: dict[str, ProcessLoad] = {}
        self._edges: dict[str, dict[str, EdgeNews]] = {}
        self._rates: defaultdict[tuple[str, ...], Rate] = defaultdict(Rate)
        self._partitions: dict[str, str] = {}
        self._next_parts = self._next_loads = 0.0
        self._host_loads = HostLoads()
        self._running: frozenset[str] = frozenset()
        if view.spec.graph:  # as declared; the conductor sends the graph of the checkpoint later
            self._graph(view.spec.graph)

    # -- input --------------------------------------------------------------------------------------------------------

    def take(self, child: str, telemetry: Telemetry) -> None:
        """Handle one telemetry batch of a child."""
        self.requests.take(child, telemetry, self.hub.now())
        for edge in telemetry.edges:
            key = f"{edge.name}@{edge.source_rank}>{edge.into_rank}"
            self._edges.setdefault(key, {})[child] = edge
        for sample in telemetry.samples:
            self._api_samples[sample.name, tuple(sample.labels)] = sample
        if telemetry.sessions is not None:
            self._put_sessions(telemetry.sessions)

    def part(self, child: str) -> None:
        """Drop the state that a child reported, after its end."""
        self.requests.part(child)
        if child == API:
            self._put_sessions([])
        for reported in self._edges.values():
            reported.pop(child, None)

    def _put_sessions(self, sessions: Sequence[SessionNews]) -> None:
        known = {f"{news.kind}/{news.id}": news for news in sessions}
        for key in [key for key in self.hub.store.sessions if key not in known]:
            self.hub.remove("sessions", key)
        for key, news in known.items():
            self.hub.put("sessions", key, _session(news))

    def circumstances(self, child: str) -> Circumstances:
        """Return the memory use of a child that has just died, and recent out-of-memory kills."""
        reading = self._reading_of(child)
        kills = self._kills.recent() if reading is None else reading.memory_kills
        return Circumstances(resident_bytes=self._resident.get(child), memory_kills=kills)

    def _reading_of(self, name: str) -> HostReading | None:
        """Return the last reading of a child's host, None for the supervisor's own host."""
        child = self._view.children.get(name)
        return None if child is None or not child.host else self._view.hosts.reading(child.host)

    def phase(self, child: str, phase: Phase) -> dict[str, Any]:
        """Handle a start-up phase. Returns its facts without the graph."""
        if phase.phase == "weights" and phase.total:
            self.weights[child] = phase.total
        if GRAPH_FACT not in phase.facts:
            return phase.facts
        self._graph(phase.facts[GRAPH_FACT])
        return {name: fact for name, fact in phase.facts.items() if name != GRAPH_FACT}

    def _graph(self, plain: Mapping[str, Any]) -> None:
        graph = msgspec.convert(plain, type=GraphView)
        self._partitions = {node.name: node.partition for node in graph.nodes}
        self.requests.graph = graph
        self.hub.graph(graph)

    @property
    def refused(self) -> dict[str, float]:
        """Requests that the api refused before admission, by code."""
        samples = (sample for sample in self._api_samples.values() if sample.name == "mstar_rejected_total")
        return {sample.labels[0]: sample.value for sample in samples}

    def _api_count(self, name: str) -> int:
        sample = self._api_samples.get((name, ()))
        return 0 if sample is None else int(sample.value)

    def event(self, flat: Mapping[str, Any]) -> None:
        """Publish an event of the feed."""
        facts = {name: value for name, value in flat.items() if name not in ("n", "time", "type")}
        self.hub.event(Event(n=flat["n"], type=flat["type"], time=flat["time"], facts=facts))

    # -- metrics ------------------------------------------------------------------------------------------------------

    def shared_samples(self) -> list[MetricSample]:
        """Return the metric samples that the api shows too."""
        return list(shared_samples(self.hub.store, self._view.values, self._view.restarts))

    def exposition(self) -> bytes:
        """Render all metrics, those last reported by the api included, in the Prometheus text format."""
        self.refresh(now_all=True)
        of_socket = socket_samples(self.hub.store, self._view.state, self.hub.watchers)
        return exposition(FAMILIES.values(), [*self._api_samples.values(), *self.shared_samples(), *of_socket])

    # -- output -------------------------------------------------------------------------------------------------------

    def refresh(self, *, now_all: bool = False) -> None:
        """Update the hub: requests always, the rest at its interval or with `now_all`."""
        now = self.hub.now()
        self.requests.settle(now)
        for handle, request in self.requests.take_dirty(now):
            if request is None:
                self.hub.remove("requests", str(handle))
            else:
                self.hub.put("requests", str(handle), request)
        if now >= self._next_loads:
            self._next_loads = now + LOADS_S
            self._look(now)
        running = frozenset(name for name, child in self._view.children.items() if child.is_running)
        if now_all or now >= self._next_parts or running != self._running:
            self._running = running
            self._next_parts = now + PARTS_S
            self._put_edges(now)
            nodes = self._nodes(now)
            for key, node in nodes.items():
                self.hub.put("nodes", key, node)
            self._put_ranks(nodes, now)
            self._put_children()
            self.hub.head(self._head(nodes, now))

    def _look(self, now: float) -> None:
        children = self._view.children.items()
        pids = {name: child.pid if child.is_running else None for name, child in children if not child.host}
        own = {SUPERVISOR: os.getpid(), STANDBY: self._view.standby.pid}
        self._loads = {name: self._processes.read(pid, now) for name, pid in {**pids, **own}.items()}
        for name, child in children:
            if child.host and (reading := self._view.hosts.reading(child.host)) is not None:
                self._loads[name] = ProcessLoad(reading.cores.get(name), reading.resident_bytes.get(name))
        # A dead process that was not reaped yet has no memory: keep its last reading for the death record.
        self._resident |= {name: load.resident_bytes for name, load in self._loads.items() if load.resident_bytes}
        self._kills.sample(now)
        for key, host in self._view.hosts.statuses(self._host_loads.read(now)).items():
            self.hub.put("hosts", key, host)
        own_gpus = self._gpus.latest(now)
        ranks: dict[str, list[int]] = {}
        keys = {("", device): key for device, key in device_keys(own_gpus).items()}
        gpus = {str(gpu.index): gpu for gpu in own_gpus} | self._view.hosts.gpus()
        keys |= {(gpu.host, f"cuda:{gpu.index}"): key for key, gpu in gpus.items() if gpu.host}
        for plan in self._view.spec.plan.ranks:
            if (place := (plan.host, plan.device)) in keys:
                ranks.setdefault(keys[place], []).append(plan.rank)
        for key, gpu in gpus.items():
            self.hub.put("gpus", key, msgspec.structs.replace(gpu, ranks=ranks.get(key, [])))
        for key in [key for key in self.hub.store.gpus if "/" in key and key not in gpus]:
            self.hub.remove("gpus", key)

    def _put_edges(self, now: float) -> None:
        for key, reported in self._edges.items():
            if not reported:
                self._rest_edge(key)
                continue
            items = sum(edge.items for edge in reported.values())
            size = sum(edge.size_bytes for edge in reported.values())
            transfers = sum(edge.transfers for edge in reported.values())
            per_s = self._rate(now, transfers, "edge", key, "transfers")
            seconds = self._rate(now, sum(edge.transfer_s for edge in reported.values()), "edge", key, "transfer_s")
            edge = max(reported.values(), key=lambda news: news.into)  # only the sender knows the name of the receiver
            items_s, bytes_s = self._rate(now, items, "edge", key, "items"), self._rate(now, size, "edge", key, "bytes")
            if not (self._runs(edge.source_rank) and self._runs(edge.into_rank)):
                per_s = items_s = bytes_s = 0.0
            self.hub.put(
                "edges",
                key,
                EdgeStatus(
                    name=edge.name,
                    source=edge.source,
                    into=edge.into or receiver(self.hub.store.graph, edge.name, edge.source, edge.into_rank),
                    source_rank=edge.source_rank,
                    into_rank=edge.into_rank,
                    is_stream=edge.is_stream,
                    items=items,
                    bytes=size,
                    items_s=round(items_s, 1),
                    bytes_s=round(bytes_s),
                    transfer_ms=round(seconds / per_s * 1000, 3) if per_s else None,
                ),
            )

    def _rest_edge(self, key: str) -> None:
        """Show an edge that no running process reports at rest."""
        known = self.hub.store.edges.get(key)
        if known is not None:
            self.hub.put("edges", key, msgspec.structs.replace(known, items_s=0.0, bytes_s=0.0, transfer_ms=None))

    def _runs(self, rank: int) -> bool:
        """Whether the process of a rank runs. A rank without a process is not known to be down."""
        names = {worker_name(rank), follower_name(rank)} & self._view.children.keys()
        return not names or not self._running.isdisjoint(names)

    def _nodes(self, now: float) -> dict[str, NodeStatus]:
        nodes: dict[str, NodeStatus] = {}
        walks = _walks(self._view.values)
        placed = {name for plan in self._view.spec.plan.ranks for name in plan.held}
        branches = [name for name in self._partitions if name not in placed]  # they run in another node's steps
        for plan in self._view.spec.plan.ranks:
            where = worker_name(plan.rank)
            seen = [name for name in branches if f"{where}.{name}.steps" in self._view.values]
            for name in (*plan.nodes, *seen):
                nodes[f"{name}@{plan.rank}"] = self._node(name, plan.rank, walks, now)
        busiest = max(nodes, key=lambda key: nodes[key].busy, default=None)
        if busiest is not None and nodes[busiest].busy >= BUSY:
            nodes[busiest] = msgspec.structs.replace(nodes[busiest], is_bottleneck=True)
        return nodes

    def _node(self, name: str, rank: int, walks: Mapping[str, dict[str, int]], now: float) -> NodeStatus:
        where, values = f"{worker_name(rank)}.{name}", self._view.values if self._runs(rank) else {}
        group = self._view.spec.plan.group_of(rank)

        def number(reading: str) -> float:
            return values.get(f"{where}.{reading}", 0.0)

        def count(reading: str) -> int:
            return int(number(reading))

        def rate(reading: str) -> float:
            return self._rate(now, number(reading), "node", name, str(rank), reading)

        def ms(reading: str) -> float | None:
            return round(number(reading) * 1000, 3) if count("steps") else None

        steps_s, busy = rate("steps"), rate("busy_s")
        hits, misses = count("graph_hits"), count("graph_misses")
        prefill_hits, prefill_misses = count("prefill_hits"), count("prefill_misses")
        replayed, plain = hits + prefill_hits, misses + prefill_misses
        eager = {kind: n for kind, n in (("decode", misses), ("prefill", prefill_misses)) if n}
        underruns = values.get(f"{where}.underruns")
        return NodeStatus(
            name=name,
            rank=rank,
            partition=self._partitions.get(name, ""),
            batch=count("batch") if steps_s else 0,
            step_ms=round(busy / steps_s * 1000, 3) if steps_s else None,
            step_p50_ms=ms("step_p50_s"),
            step_p99_ms=ms("step_p99_s"),
            steps_s=round(steps_s, 1),
            rows_s=round(rate("rows"), 1),
            tokens_s=round(rate("tokens"), 1),
            queue=count("ready"),
            waiting=count("waiting"),
            walks=walks.get(where, {}),
            pages_used=count("pages_used"),
            pages_total=count("pages_total"),
            pages_cached=count("pages_cached"),
            pages_leased=count("pages_leased"),
            slots_used=count("slots_used"),
            slots_total=count("slots_total"),
            preempted=count("preempted"),
            graph_share=round(replayed / (replayed + plain), 4) if replayed + plain else None,
            eager=eager if replayed else {},
            captured=count("graphs_captured"),
            planned=count("graphs_planned"),
            busy=round(min(1.0, busy), 3),
            ranks=list(group.ranks) if group is not None and name in group.nodes else [],
            ahead_s=values.get(f"{where}.ahead_s"),
            underruns=None if underruns is None else int(underruns),
        )

    def _put_ranks(self, nodes: Mapping[str, NodeStatus], now: float) -> None:
        values = self._view.values
        gpus: dict[str, str] = {}
        for key, gpu in self.hub.store.gpus.items():
            assert isinstance(gpu, GpuStatus)
            gpus.update({str(rank): key for rank in gpu.ranks})
        for plan in self._view.spec.plan.ranks:
            name = worker_name(plan.rank) if plan.nodes else follower_name(plan.rank)
            child = self._view.children.get(name)
            group = self._view.spec.plan.group_of(plan.rank)
            mine = [node for node in nodes.values() if node.rank == plan.rank]
            shared = [] if group is None else [nodes[f"{node}@{group.leader}"] for node in plan.follows]
            is_running = self._runs(plan.rank)
            values = self._view.values if is_running else {}
            load = self._loads.get(name, NO_LOAD) if is_running else NO_LOAD
            own_steps_s = self._rate(now, values.get(f"{name}.steps", 0.0), "rank", name, "steps")
            used, total = values.get(f"{name}.memory_used"), values.get(f"{name}.memory_total")
            if plan.device == "cpu":  # the device of a CPU rank is the host
                used, total = load.resident_bytes, self._memory_of(plan.host)
            asleep = self._view.sleep.of_rank(plan.rank)
            rank = RankStatus(
                rank=plan.rank,
                host=plan.host,
                device=plan.device,
                gpu=gpus.get(str(plan.rank)),
                state="" if child is None else self._state_of(child),
                pid=child.pid if child is not None and is_running else None,
                nodes=list(plan.nodes),
                requests=int(values.get(f"{name}.requests", 0)),
                steps_s=round(own_steps_s + sum(node.steps_s for node in shared if is_running), 1),
                busy=round(min(1.0, sum(node.busy for node in (*mine, *shared) if is_running)), 3),
                core=load.core,
                resident_bytes=load.resident_bytes,
                memory_used=None if used is None else int(used),
                memory_total=None if total is None else int(total),
                weights_bytes=self.weights.get(name),
                pages_used=sum(node.pages_used for node in mine),
                pages_total=sum(node.pages_total for node in mine),
                pages_cached=sum(node.pages_cached for node in mine),
                pages_leased=sum(node.pages_leased for node in mine),
                shm_bytes=int(values.get(f"{name}.shm_bytes", 0)),
                follows=list(plan.follows),
                group=[] if group is None else list(group.ranks),
                epoch=child.incarnation if child is not None and group is not None else 0,
                plans=int(values.get(f"{follower_name(plan.rank)}.plans", 0)),
                asleep=sorted(asleep.nodes),
                given_back_bytes=asleep.freed,
                kept_bytes=asleep.kept,
            )
            self.hub.put("ranks", str(plan.rank), rank)
        placed = {str(plan.rank) for plan in self._view.spec.plan.ranks}
        for key in [key for key in self.hub.store.ranks if key not in placed]:
            self.hub.remove("ranks", key)
        for key in [key for key in self.hub.store.nodes if key not in nodes]:
            self.hub.remove("nodes", key)

    def _memory_of(self, host: str) -> int | None:
        """Return the bytes of memory of a host, None if they are unknown."""
        status = self.hub.store.hosts.get(host) if host else None
        return self._host_bytes if not host else status.memory_total if isinstance(status, HostStatus) else None

    def _put_children(self) -> None:
        for name, child in self._view.children.items():
            self.hub.put("children", name, self._child(child))
        standby = self._view.standby
        own = {SUPERVISOR: self._own(SUPERVISOR, os.getpid(), "ready")}
        if standby.pid is not None:
            own[STANDBY] = self._own(STANDBY, standby.pid, "ready" if standby.is_ready else "spawned")
        for name in [name for name in self.hub.store.children if name not in {*self._view.children, *own}]:
            self.hub.remove("children", name)
        for name, status in own.items():
            self.hub.put("children", name, status)

    def _own(self, name: str, pid: int, state: str) -> ChildStatus:
        """Return the status of the supervisor or the standby process, which have no mailbox among the children."""
        load = self._loads.get(name, NO_LOAD)
        return ChildStatus(name=name, state=state, pid=pid, core=load.core, resident_bytes=load.resident_bytes)

    def _child(self, child: Process) -> ChildStatus:
        load = self._loads.get(child.name, NO_LOAD) if child.is_running else NO_LOAD
        return ChildStatus(
            name=child.name,
            host=child.host,
            state=self._state_of(child),
            pid=child.pid,
            rank=process_rank(child.name),
            incarnation=child.incarnation,
            phase=child.phase,
            done=child.phase_done,
            total=child.phase_total,
            detail=child.detail,
            phases_s={name: round(seconds, 3) for name, seconds in child.phases_s.items()},
            facts=child.facts,
            restarts=max(0, child.incarnation - 1),
            core=load.core,
            resident_bytes=load.resident_bytes,
        )

    def _state_of(self, child: Process) -> str:
        """Return the state of a process.

        `sleeping` for a ready one whose nodes sleep, `cordoned` for one whose replica gets no new requests.
        """
        state, rank, cordoned = state_of(child), process_rank(child.name), self._view.cordoned
        if state == "ready" and rank is not None and self._view.sleep.is_rank_asleep(child.name):
            return ASLEEP
        if state != "ready" or rank is None or not cordoned:
            return state
        group = self._view.spec.plan.group_of(rank) if rank_of(child.name) is None else None
        return "cordoned" if (rank if group is None else group.leader) in cordoned else state

    def _head(self, nodes: Mapping[str, NodeStatus], now: float) -> DeploymentStatus:
        view, spec, log = self._view, self._view.spec, self.requests
        values = view.values
        states = [request.state for request in self.hub.store.requests.values()]
        slowest = next((c for c in sorted(view.children.values(), key=_start_order) if c.state != "ready"), None)
        ttft, ttfa = log.ttft.quantiles(now, 0.5, 0.99), log.ttfa.quantiles(now, 0.5, 0.99)
        ended = sum(values.get(f"{API}.{what}", 0.0) for what in ("finished", "failed", "cancelled"))
        phase = "" if slowest is None or view.state != "starting" else f"{slowest.name}: {slowest.phase}"
        done, total = (0, 0) if slowest is None else (slowest.phase_done, slowest.phase_total)
        if view.sleep.is_waking:
            phase, (done, total) = "wake", view.sleep.progress
        return DeploymentStatus(
            name=spec.name,
            model=spec.model,
            plugin=spec.plugin,
            state=view.state,
            reason=view.reason,
            phase=phase,
            done=done,
            total=total,
            endpoint=spec.api.url,
            pid=os.getpid(),
            log_dir=spec.log_dir,
            started=view.started,
            started_at=view.started_at,
            ready_s=view.ready_s,
            ranks=len(spec.plan.ranks),
            hosts=len(spec.hosts),
            cordoned=sorted(view.cordoned),
            restarts=view.restarts,
            running=states.count("run"),
            waiting=states.count("queue"),
            preparing=states.count("prepare"),
            slots=spec.max_concurrent_requests,
            queue_limit=spec.max_queue,
            finished=int(values.get("api.finished", 0)),
            failed=int(values.get("api.failed", 0)),
            cancelled=int(values.get("api.cancelled", 0)),
            refused=int(values.get("api.refused", 0)),
            requests_s=round(self._rate(now, ended, "head", "requests"), 2),
            ttft_p50_ms=_ms(ttft[0]),
            ttft_p99_ms=_ms(ttft[1]),
            ttfa_p50_ms=_ms(ttfa[0]),
            ttfa_p99_ms=_ms(ttfa[1]),
            latency_p50_ms=_ms(log.latency.quantiles(now, 0.5)[0]),
            tokens_s=round(self._rate(now, log.tokens, "head", "tokens"), 1),
            audio_x=round(self._rate(now, log.audio_s, "head", "audio"), 2),
            pages_used=sum(node.pages_used for node in nodes.values()),
            pages_total=sum(node.pages_total for node in nodes.values()),
            pages_leased=sum(node.pages_leased for node in nodes.values()),
            preempted=sum(node.preempted for node in nodes.values()),
            sessions=int(values.get(f"{API}.sessions", 0)),
            realtime_sessions=self._api_count("mstar_realtime_sessions"),
            realtime_interrupts=self._api_count("mstar_realtime_interrupts_total"),
            cause=None if view.cause is None else {k: v for k, v in view.cause.items() if k != "traceback"},
            last_failure=view.failures[-1] if view.failures else None,
            failures=list(view.failures),
            asleep=view.sleep.nodes,
            sleep_level=view.sleep.level,
            given_back_bytes=view.sleep.freed,
            wakes=view.sleep.wakes,
            slept_at=view.sleep.slept_at,
            woke_at=view.sleep.woke_at,
        )

    def _rate(self, now: float, value: float, *what: str) -> float:
        return self._rates[what].at(now, value)


def _session(news: SessionNews) -> SessionStatus:
    return SessionStatus(
        id=news.id,
        kind=news.kind,
        speaks=news.speaks,
        began=news.began,
        is_lost=news.is_lost,
        answers=news.answers,
        running=news.running,
        interrupts=news.interrupts,
        false_starts=news.false_starts,
        items=news.items,
        request=news.request,
        first_audio_ms=_ms(news.first_audio_s),
        lease_ends=None if news.used is None else news.used + news.lease_s,
    )


def state_of(child: Process) -> str:
    """Return the state of a process: `ended` from the moment of its death, before the supervisor has handled it."""
    return child.state if child.is_running or not child.incarnation else "ended"


def _start_order(child: Process) -> tuple[int, str]:
    """Sort key: workers first, because their phases take longest and are the ones to show."""
    return (0 if process_rank(child.name) is not None else 1, child.name)


def _walks(values: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return `worker-RANK.NODE` -> walk -> requests in it there, from readings named `worker-RANK.NODE.walk.WALK`."""
    walks: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, value in values.items():
        node, is_walk, walk = name.partition(".walk.")
        if is_walk and value:
            walks[node][walk] = int(value)
    return walks


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
