"""Synthetic watches: frames of simulated deployments, seeded and without a clock.

A deployment's figures come from requests that walk through its stages, so that all parts of a picture agree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mstar_core.observe.frames import (
    ChildStatus,
    DeltaFrame,
    DeploymentStatus,
    EdgeStatus,
    Event,
    EventFrame,
    Frame,
    GpuStatus,
    HelloFrame,
    HostStatus,
    NodeStatus,
    RankStatus,
    RequestStatus,
)
from mstar_core.observe.hub import changed_fields
from mstarctl.client.store import Store
from tests.top.models import Model, Stage, qwen_graph

GIB = 2**30
EPOCH = 1_795_251_000.0


@dataclass(slots=True)
class Live:
    """A simulated request. steps: stages with start and end; parallel from `talk` on."""

    id: str
    handle: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    born: float
    admitted: float
    plan: list[tuple[Stage, float, float]] = field(default_factory=list)
    prompt: int = 0
    why: str = ""

    @property
    def end(self) -> float:
        return max(until for _, _, until in self.plan)


class Simulation:
    """Simulates a watch with `frames(seconds)`. store: the last state that was sent."""

    def __init__(
        self,
        model: Model,
        *,
        seed: int = 7,
        requests: int = 17,
        hz: float = 4.0,
        uptime: float = 7860.0,
        hosts: Mapping[int, str] | None = None,
    ):
        self.model, self.hz = model, hz
        self.hosts = hosts or {}  # host by rank; a rank that is left out runs on the supervisor's
        self.host_states: dict[str, tuple[str, str]] = {}  # state and reason of hosts that are not ready
        self.random = random.Random(seed)
        self.wanted = requests
        self.start = 11.5
        self.t = self.start + uptime
        self.rev = 88120
        self.store = Store()
        self.live: list[Live] = []
        self.handles = 4700
        self.events = 40
        self.finished = 0
        self.totals: dict[str, list[float]] = {edge.name: [18_000.0, 4e8] for edge in model.edges}
        self.rates: dict[str, list[float]] = {}
        self.cause: dict[str, Any] | None = None
        for _ in range(requests):
            self._arrive(self.t - self.random.uniform(0.05, 3.2))

    def hello(self) -> list[Frame]:
        """Return the first two frames of a watch."""
        self._fill(self.store)
        self.store.rev, self.store.is_synced, self.store.t = self.rev, True, self.t
        for ago, kind, facts in (
            (7800.0, "deployment.ready", {"endpoint": "http://127.0.0.1:8000"}),
            (95.0, "api.refused", {"status": 429, "count": 3}),
            (72.0, "kv.preempt", {"request": "r-7f11", "pages": 96, "why": "pool full"}),
        ):
            self.store.events.append(self._event(kind, facts, ago))
        return [HelloFrame(boot=f"boot-{self.model.name}", hz=self.hz, rev=self.rev), self.store.snapshot(events=3)]

    def frames(self, seconds: float) -> Iterator[tuple[float, Frame]]:
        """Yield (seconds since the start of the watch, frame)."""
        yield from ((0.0, frame) for frame in self.hello())
        begun = self.t
        for _ in range(round(seconds * self.hz)):
            yield from ((self.t - begun, frame) for frame in self.step())

    def step(self) -> list[Frame]:
        """Return the frames of one tick of 1/hz."""
        self.t = round(self.t + 1 / self.hz, 6)
        self.rev += 35
        for request in [r for r in self.live if r.end + 0.5 < self.t]:
            self.live.remove(request)
            self.finished += 1
        while len(self.live) < self._load():
            self._arrive(self.t)
        after = self.store.rev
        fresh = Store()
        self._fill(fresh)
        delta = self._delta(fresh, after)
        self.store.apply(delta)
        frames: list[Frame] = [delta]
        if self.random.random() < 0.04:
            frames.append(self._told("kv.preempt", {"request": self.live[0].id, "pages": 96, "why": "pool full"}))
        return frames

    def _load(self) -> int:
        """Return the target number of requests: a slow wave around `wanted`, which gives curves a shape."""
        return max(1, round(self.wanted * (1 + 0.3 * math.sin(self.t / 23) + 0.12 * math.sin(self.t / 5))))

    def lose(self, cause: dict[str, Any]) -> list[Frame]:
        """Simulate the death of a worker: the cause in the head, and an event."""
        self.cause = cause
        return [*self.step(), self._told("child.died", {"child": "worker-0", "cause": cause["message"]})]

    def _told(self, kind: str, facts: dict[str, Any]) -> EventFrame:
        self.rev += 1
        frame = EventFrame(rev=self.rev, t=self.t, event=self._event(kind, facts))
        self.store.apply(frame)
        return frame

    def _event(self, kind: str, facts: dict[str, Any], ago: float = 0.0) -> Event:
        self.events += 1
        t = max(self.start, self.t - ago)
        return Event(n=self.events, type=kind, time=EPOCH + t, t=t, rev=self.rev, facts=facts)

    # -- requests -----------------------------------------------------------------------------------------------

    def _arrive(self, born: float) -> None:
        inputs, outputs, names = self.random.choice(self.model.routes)
        self.handles += 1
        is_late = len([r for r in self.live if r.admitted > self.t]) < max(1, self.wanted // 8)
        wait = self.random.uniform(1.0, 2.0) if is_late and born > self.t - 0.3 else self.random.uniform(0.002, 0.04)
        request = Live(f"r-{self.handles + 0x6C8A:04x}", self.handles, inputs, outputs, born, born + wait)
        request.prompt = self.random.randint(40, 900)
        request.why = self.random.choice(("needs 96 pages", "rank 0 busy", "prompt budget"))
        at = born + wait
        for name in names:
            stage = self.model.stages[name]
            length = stage.seconds * self.random.uniform(0.6, 1.5)
            if name in ("talk", "wav", "snac"):  # these run in parallel with their producers
                feeder = request.plan[-1]
                begin = feeder[1] + self.random.uniform(0.05, 0.15)
                request.plan.append((stage, begin, max(feeder[2], begin) + 0.25))
            else:
                request.plan.append((stage, at, at + length))
                at += length
        self.live.append(request)

    def _request(self, r: Live) -> RequestStatus:
        has_ended = r.end <= self.t
        under_way = [stage for stage, begin, until in r.plan if begin <= self.t < until]
        done = [stage for stage, _, until in r.plan if until <= self.t]
        here = under_way[-1] if under_way else None
        decode = next((p for p in r.plan if p[0].tokens_s and p[1] <= self.t), None)
        wav = next((p for p in r.plan if p[0].audio_x and p[1] <= self.t), None)
        tokens = int((min(self.t, decode[2]) - decode[1]) * decode[0].tokens_s) if decode else 0
        is_waiting = self.t < r.admitted
        return RequestStatus(
            id=r.id,
            handle=r.handle,
            route="/generate",
            model=self.model.name,
            inputs=list(r.inputs),
            outputs=list(r.outputs),
            state="finished" if has_ended else "queue" if is_waiting else "run",
            node=None if here is None or has_ended else here.node,
            rank=None if here is None or has_ended else here.rank,
            walk=None if here is None or has_ended else here.walk,
            started=round(r.born, 3),
            ended=round(r.end, 3) if has_ended else None,
            ttft_ms=round((decode[1] - r.born) * 1000, 1) if decode else None,
            ttfa_ms=round((wav[1] - r.born) * 1000 + 120, 1) if wav and self.t > wav[1] + 0.12 else None,
            tokens=tokens,
            prompt_tokens=r.prompt,
            audio_s=round((min(self.t, wav[2]) - wav[1]) * wav[0].audio_x, 2) if wav else 0.0,
            waited_ms=round((min(self.t, r.admitted) - r.born) * 1000, 1),
            pages=sum(stage.pages for stage in {s.node: s for s in under_way}.values()) + tokens // 16,
            active=[stage.walk for stage in under_way],
            walks={stage.walk: 1 for stage in done},
            why=r.why if is_waiting else "",
        )

    # -- everything else ----------------------------------------------------------------------------------------

    def _fill(self, store: Store) -> None:
        requests = {str(r.handle): self._request(r) for r in self.live}
        store.graph = self.model.graph
        store.requests = requests
        store.nodes = {f"{node.name}@{node.rank}": node for node in self._nodes(requests)}
        store.edges = {f"{edge.name}@{edge.source_rank}>{edge.into_rank}": edge for edge in self._edges(requests)}
        store.ranks = {str(rank.rank): rank for rank in self._ranks(store)}
        store.gpus = {f"{gpu.host}/{gpu.index}" if gpu.host else str(gpu.index): gpu for gpu in self._gpus(store)}
        store.hosts = dict(self._host_items())
        store.children = {child.name: child for child in self._children()}
        store.deployment = self._head(store)

    def _wobble(self, value: float, share: float = 0.08) -> float:
        return round(value * self.random.uniform(1 - share, 1 + share), 2)

    def _nodes(self, requests: dict[str, RequestStatus]) -> Iterator[NodeStatus]:
        seen: dict[str, Stage] = {}
        for stage in self.model.stages.values():
            seen[stage.node] = stage
        waiting = sum(1 for r in requests.values() if r.state == "queue")
        slowest = self.model.graph.nodes[-1].name if not self.model.gpus else "Thinker"
        for name, stage in seen.items():
            walks: dict[str, int] = {}
            for request in requests.values():
                for walk in request.active:
                    if any(s.walk == walk and s.node == name for s in self.model.stages.values()):
                        walks[walk] = walks.get(walk, 0) + 1
            batch = sum(walks.values())
            is_paged = bool(stage.pages)
            steps_s = 1000 / stage.step_ms if batch else 0.0
            audio = stage.audio_x > 0
            yield NodeStatus(
                name=name,
                rank=stage.rank,
                partition=stage.partition,
                batch=batch,
                step_ms=self._wobble(stage.step_ms) if batch else None,
                step_p50_ms=stage.step_ms,
                step_p99_ms=round(stage.step_ms * 1.9, 1),
                steps_s=round(steps_s, 1),
                rows_s=round(steps_s * batch, 1),
                tokens_s=self._wobble(stage.tokens_s * batch, 0.04),
                queue=waiting if name == slowest else 0,
                walks=walks,
                pages_used=sum(r.pages for r in requests.values()) * 6 if is_paged else 0,
                pages_total=8192 if is_paged else 0,
                pages_cached=311 if is_paged else 0,
                slots_used=batch if is_paged else 0,
                slots_total=self.model.slots if is_paged else 0,
                graph_share=0.987 if is_paged and self.model.gpus else None,
                eager={"batch > 64": 41, "prompt": 12} if is_paged and self.model.gpus else {},
                busy=min(0.97, self._wobble(min(0.95, batch * 0.07 + 0.02))) if batch else 0.01,
                is_bottleneck=name == slowest,
                ahead_s=round(self.random.uniform(0.3, 0.6), 2) if audio and batch else None,
                underruns=0 if audio else None,
            )

    def _edges(self, requests: dict[str, RequestStatus]) -> Iterator[EdgeStatus]:
        for edge in self.model.edges:
            flow = sum(
                82
                for r in requests.values()
                if any(s.node == edge.source and s.walk in r.active for s in self.model.stages.values() if s.tokens_s)
            )
            total = self.totals[edge.name]
            total[0] += flow / self.hz
            total[1] += flow / self.hz * 6144
            yield EdgeStatus(
                name=edge.name,
                source=edge.source,
                into=edge.into,
                source_rank=edge.source_rank,
                into_rank=edge.into_rank,
                is_stream=edge.is_stream,
                items=int(total[0]),
                bytes=int(total[1]),
                items_s=self._wobble(flow, 0.03),
                bytes_s=float(flow * 6144),
                transfer_ms=self._wobble(0.12) if edge.source_rank != edge.into_rank else None,
            )

    def _ranks(self, store: Store) -> Iterator[RankStatus]:
        for number in sorted({stage.rank for stage in self.model.stages.values()}):
            nodes = [node for node in store.nodes.values() if node.rank == number]
            is_gpu = bool(self.model.gpus)
            used = (63.4 if number == 0 else 14.9) * GIB if is_gpu else 1.2 * GIB
            host = self.hosts.get(number, "")
            yield RankStatus(
                rank=number,
                host=host,
                device=f"cuda:{self._index(number)}" if is_gpu else "cpu",
                gpu=self._gpu_key(number) if is_gpu else None,
                state="ended" if host in self.host_states else "ready",
                pid=4121 + number,
                nodes=[node.name for node in nodes],
                requests=sum(node.batch for node in nodes),
                steps_s=sum(node.steps_s for node in nodes),
                busy=max(node.busy for node in nodes),
                core=self._wobble(0.93),
                resident_bytes=int(3.1 * GIB),
                memory_used=int(used),
                memory_total=int(79.1 * GIB) if is_gpu else int(32 * GIB),
                weights_bytes=int(used * 0.84),
                cache_bytes=int(used * 0.12),
                pages_used=sum(node.pages_used for node in nodes),
                pages_total=sum(node.pages_total for node in nodes),
                pages_cached=sum(node.pages_cached for node in nodes),
                shm_bytes=48 * 2**20,
            )

    def _gpus(self, store: Store) -> Iterator[GpuStatus]:
        for index, name in enumerate(self.model.gpus):
            rank = store.ranks[str(index)]
            yield GpuStatus(
                index=self._index(index),
                host=rank.host,
                is_stale=rank.host in self.host_states,
                uuid=f"GPU-{index}",
                name=name,
                util=round(rank.busy, 2),
                memory_used=(rank.memory_used or 0) + 6 * GIB,
                memory_total=rank.memory_total,
                power_w=round(130 + 520 * rank.busy),
                power_limit_w=700.0,
                temperature_c=48.0 + round(20 * rank.busy),
                clock_mhz=1980.0,
                ranks=[index],
            )

    def _index(self, rank: int) -> int:
        """Return the index of a rank's GPU on its host."""
        return sum(self.hosts.get(other, "") == self.hosts.get(rank, "") for other in range(rank))

    def _gpu_key(self, rank: int) -> str:
        host = self.hosts.get(rank, "")
        return f"{host}/{self._index(rank)}" if host else str(self._index(rank))

    def _host_items(self) -> Iterator[tuple[str, HostStatus]]:
        for place, name in enumerate(["", *dict.fromkeys(self.hosts.values())] if self.hosts else []):
            state, reason = self.host_states.get(name, ("ready", ""))
            yield (
                name or "local",
                HostStatus(
                    title=name or "node-a",
                    address=f"10.0.0.{place + 1}",
                    node=f"9f0{place}c2",
                    state=state,
                    reason=reason,
                    pid=5100 + place if name else None,
                    incarnation=1 if name else 0,
                    heard=self.t - 12.0 if name in self.host_states else self.t,
                    round_trip_ms=0.21 if name and state == "ready" else None,
                    versions={"mstarctl": "0.4.0", "ray": "2.60.0", "python": "3.12.4", "cuda": "12.8"},
                    cores=[0.31, 0.9, 0.12, 0.08, 0.44, 0.02, 0.0, 0.2],
                    memory_used=(41 + 7 * place) * GIB,
                    memory_total=256 * GIB,
                    net_in_s=(3 + place) * 2**20,
                    net_out_s=(2 + place) * 2**20,
                ),
            )

    def _children(self) -> Iterator[ChildStatus]:
        yield ChildStatus(name="api", state="ready", pid=4110, core=self._wobble(0.41), resident_bytes=210 * 2**20)
        yield ChildStatus(name="conductor", state="ready", pid=4111, core=self._wobble(0.12), resident_bytes=90 * 2**20)
        for number in sorted({stage.rank for stage in self.model.stages.values()}):
            host = self.hosts.get(number, "")
            state = "ended" if host in self.host_states else "ready"
            yield ChildStatus(
                name=f"worker-{number}", host=host, state=state, pid=4121 + number, rank=number, core=0.93
            )

    def _head(self, store: Store) -> DeploymentStatus:
        running = [r for r in store.requests.values() if r.state == "run"]
        firsts = sorted(r.ttft_ms for r in running if r.ttft_ms is not None)
        speaking = [r for r in running if "audio" in r.outputs and r.ttfa_ms]
        return DeploymentStatus(
            name=self.model.name,
            model=self.model.name,
            plugin=self.model.plugin,
            state="degraded" if self.cause else "ready",
            reason=self.cause["message"] if self.cause else "",
            endpoint="http://127.0.0.1:8000",
            pid=4100,
            log_dir=f"/home/ana/.local/state/mstar/{self.model.name}/2026-11-21T06-12-30",
            started=self.start,
            started_at=EPOCH + self.start,
            ready_s=48.1,
            ranks=len(store.ranks),
            hosts=len(store.hosts),
            running=len(running),
            waiting=sum(1 for r in store.requests.values() if r.state == "queue"),
            slots=self.model.slots,
            queue_limit=256,
            finished=18_200 + self.finished,
            requests_s=3.1,
            ttft_p50_ms=round(firsts[len(firsts) // 2]) if firsts else None,
            ttft_p99_ms=round(firsts[-1] * 1.3) if firsts else None,
            ttfa_p50_ms=402.0 if speaking else None,
            ttfa_p99_ms=610.0 if speaking else None,
            tokens_s=round(sum(node.tokens_s for node in store.nodes.values())),
            audio_x=round(3.0 * len(speaking) / 3.2, 1),
            pages_used=sum(rank.pages_used for rank in store.ranks.values()),
            pages_total=sum(rank.pages_total for rank in store.ranks.values()),
            preempted=2,
            cause=self.cause,
        )

    def _delta(self, fresh: Store, after: int) -> DeltaFrame:
        changed: dict[str, dict[str, dict[str, Any]]] = {}
        gone: dict[str, list[str]] = {}
        for name in ("ranks", "nodes", "requests", "edges", "gpus", "children", "hosts"):
            old, new = self.store.part(name), fresh.part(name)
            for key, item in new.items():
                fields = (
                    changed_fields(old[key], item) if key in old else changed_fields(type(item)(**_keys(item)), item)
                )
                fields = fields if key in old else {**_keys(item), **fields}
                if fields:
                    changed.setdefault(name, {})[key] = fields
            lost = [key for key in old if key not in new]
            if lost:
                gone[name] = lost
        head = changed_fields(self.store.deployment, fresh.deployment)
        return DeltaFrame(rev=self.rev, t=self.t, after=after, deployment=head, set=changed, delete=gone)


def _keys(item: Any) -> dict[str, Any]:
    """Return the fields of an item that are set."""
    return {
        name: getattr(item, name)
        for name in ("name", "rank", "id", "handle", "index")
        if name in item.__struct_fields__
    }


def starting() -> list[Frame]:
    """Return the frames of a deployment that reads its weights."""
    head = DeploymentStatus(
        name="qwen3_omni",
        model="qwen3_omni",
        state="starting",
        phase="weights",
        done=int(41.8 * GIB),
        total=int(62.1 * GIB),
        ranks=2,
        started=11.5,
        started_at=EPOCH,
    )
    store = Store(rev=12, t=20.5, is_synced=True, deployment=head, graph=qwen_graph())
    store.ranks = {
        "0": RankStatus(
            rank=0, device="cuda:0", gpu="0", state="known", nodes=["audio_encoder", "vision_encoder", "Thinker"]
        ),
        "1": RankStatus(rank=1, device="cuda:1", gpu="1", state="known", nodes=["Talker", "Code2Wav"]),
    }
    store.gpus = {
        "0": GpuStatus(
            index=0,
            name="NVIDIA H100 80GB HBM3",
            util=0.02,
            memory_used=44 * GIB,
            memory_total=int(79.1 * GIB),
            power_w=131,
            power_limit_w=700,
        )
    }
    store.children = {
        "api": ChildStatus(name="api", state="known", pid=4110, phase="wait"),
        "conductor": ChildStatus(name="conductor", state="ready", pid=4111),
        "worker-0": ChildStatus(
            name="worker-0",
            state="known",
            pid=4121,
            rank=0,
            phase="weights",
            done=int(41.8 * GIB),
            total=int(62.1 * GIB),
            detail="model-00009-of-00015.safetensors",
        ),
        "worker-1": ChildStatus(
            name="worker-1", state="known", pid=4122, rank=1, phase="capture", done=17, total=24, detail="Talker 16"
        ),
    }
    return [HelloFrame(boot="boot-start", rev=12), store.snapshot()]
