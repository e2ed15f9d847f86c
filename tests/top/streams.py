"""Synthetic watches: deployments that were never started, told in the frames of real ones. Seeded, no clock.

A deployment's figures come from requests that walk through its stages, so that all parts of a picture agree.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar_core.observe.frames import (
    Child,
    DeltaFrame,
    Deployment,
    Edge,
    Event,
    EventFrame,
    Frame,
    Gpu,
    Graph,
    GraphEdge,
    GraphNode,
    GraphWalk,
    HelloFrame,
    Node,
    Rank,
    Request,
    encode,
)
from mstar_core.observe.store import Store, changed_fields
from mstarctl.top.recording import Recorder

GIB = 2**30
RECORDINGS = Path(__file__).parent / "recordings"
EPOCH = 1_795_251_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A node as requests see it. seconds: how long a request stays; tokens_s: what it makes there, of one request."""

    node: str
    rank: int
    partition: str
    walk: str
    seconds: float = 0.05
    tokens_s: float = 0.0
    audio_x: float = 0.0
    step_ms: float = 5.0
    engine: str = "kv_cache"
    pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One deployment to tell of. routes: (inputs, outputs, stages in order); the last of them run side by side."""

    name: str
    plugin: str
    gpus: tuple[str, ...]
    stages: dict[str, Stage]
    routes: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]
    graph: Graph
    edges: tuple[Edge, ...]
    slots: int = 64


def qwen() -> Model:
    """Two ranks, five nodes, three partitions: the usual split."""
    stages = {
        "audio": Stage(node="audio_encoder", rank=0, partition="Thinker", walk="prefill_audio", seconds=0.08,
                       step_ms=53.0, engine="stateless"),
        "vision": Stage(node="vision_encoder", rank=0, partition="Thinker", walk="prefill_vision", seconds=0.12,
                        step_ms=88.0, engine="stateless"),
        "prefill": Stage(node="Thinker", rank=0, partition="Thinker", walk="prefill_text", seconds=0.12, step_ms=5.2,
                         pages=38),
        "think": Stage(node="Thinker", rank=0, partition="Thinker", walk="thinker_decode", seconds=4.0, tokens_s=82.0,
                       step_ms=5.2, pages=38),
        "talk": Stage(node="Talker", rank=1, partition="Talker", walk="talker_decode", seconds=5.0, tokens_s=90.0,
                      step_ms=7.1, pages=20),
        "wav": Stage(node="Code2Wav", rank=1, partition="Code2Wav", walk="code2wav_chunk", seconds=5.0, audio_x=3.0,
                     step_ms=14.0, engine="stateless"),
    }  # fmt: skip
    speak = ("prefill", "think", "talk", "wav")
    return Model(
        name="qwen3_omni",
        plugin="mstar-qwen3omni",
        gpus=("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        stages=stages,
        routes=(
            (("text",), ("text", "audio"), speak),
            (("audio",), ("text", "audio"), ("audio", *speak)),
            (("text",), ("text",), ("prefill", "think")),
            (("image", "text"), ("text",), ("vision", "prefill", "think")),
            (("video",), ("text",), ("audio", "vision", "prefill", "think")),
        ),
        graph=qwen_graph(),
        edges=(
            Edge(name="thinker_states", source="Thinker", into="Talker", source_rank=0, into_rank=1, is_stream=True),
            Edge(name="codec_tokens", source="Talker", into="Code2Wav", source_rank=1, into_rank=1, is_stream=True),
        ),
    )


def qwen_graph() -> Graph:
    """As the plugin declares it."""
    text = ["prefill_text", "thinker_decode"]
    audio, vision = ["prefill_audio", "prefill_audio_vision"], ["prefill_vision", "prefill_audio_vision"]
    talk = ["talker_prefill", "talker_decode"]
    return Graph(
        model="qwen3_omni",
        partitions=["Thinker", "Talker", "Code2Wav"],
        nodes=[
            GraphNode(name="audio_encoder", engine="stateless", partition="Thinker", replicas=[[0]], walks=audio),
            GraphNode(name="vision_encoder", engine="stateless", partition="Thinker", replicas=[[0]], walks=vision),
            GraphNode(name="Thinker", engine="kv_cache", partition="Thinker", replicas=[[0]],
                      walks=list(dict.fromkeys((*text, *audio, *vision))), loops=["thinker_decode"]),
            GraphNode(name="Talker", engine="kv_cache", partition="Talker", replicas=[[1]], walks=talk,
                      loops=["talker_decode"]),
            GraphNode(name="Code2Wav", engine="stateless", partition="Code2Wav", replicas=[[1]],
                      walks=["code2wav_chunk"], loops=["code2wav_chunk"]),
        ],
        edges=[
            GraphEdge(name="mel", into="audio_encoder", modality="audio", walks=audio),
            GraphEdge(name="pixels", into="vision_encoder", modality="image", walks=vision),
            GraphEdge(name="tokens", into="Thinker", modality="text", walks=[*text, *audio, *vision]),
            GraphEdge(name="audio_embeds", source="audio_encoder", into="Thinker", walks=audio),
            GraphEdge(name="vision_embeds", source="vision_encoder", into="Thinker", walks=vision),
            GraphEdge(name="token", source="Thinker", modality="text", walks=[*text, *audio, *vision]),
            GraphEdge(name="thinker_states", source="Thinker", into="Talker", is_stream=True,
                      chunk="fixed 1", walks=[*text, *talk]),
            GraphEdge(name="codec_tokens", source="Talker", into="Code2Wav", is_stream=True,
                      chunk="25, left 25", walks=[*talk, "code2wav_chunk"]),
            GraphEdge(name="pcm", source="Code2Wav", modality="audio", walks=["code2wav_chunk"]),
        ],
        walks=[
            GraphWalk(name="prefill_text", partition="Thinker", nodes=["Thinker"]),
            GraphWalk(name="prefill_audio", partition="Thinker", nodes=["audio_encoder", "Thinker"]),
            GraphWalk(name="prefill_vision", partition="Thinker", nodes=["vision_encoder", "Thinker"]),
            GraphWalk(name="prefill_audio_vision", partition="Thinker",
                      nodes=["audio_encoder", "vision_encoder", "Thinker"]),
            GraphWalk(name="thinker_decode", partition="Thinker", nodes=["Thinker"]),
            GraphWalk(name="talker_prefill", partition="Talker", nodes=["Talker"]),
            GraphWalk(name="talker_decode", partition="Talker", nodes=["Talker"]),
            GraphWalk(name="code2wav_chunk", partition="Code2Wav", nodes=["Code2Wav"]),
        ],
    )  # fmt: skip


def orpheus() -> Model:
    """One rank on a CPU, two nodes, two partitions."""
    stages = {
        "prefill": Stage(node="LLM", rank=0, partition="LLM", walk="prefill", seconds=0.1, step_ms=9.0, pages=6),
        "decode": Stage(node="LLM", rank=0, partition="LLM", walk="decode", seconds=3.0, tokens_s=84.0, step_ms=9.0,
                        pages=6),
        "snac": Stage(node="snac_decoder", rank=0, partition="SNAC", walk="snac_chunk", seconds=3.0, audio_x=1.0,
                      step_ms=21.0, engine="stateless"),
    }  # fmt: skip
    both = ["decode", "snac_chunk"]
    return Model(
        name="orpheus",
        plugin="mstar-orpheus",
        gpus=(),
        stages=stages,
        routes=((("text",), ("audio",), ("prefill", "decode", "snac")),),
        slots=16,
        graph=Graph(
            model="orpheus",
            partitions=["LLM", "SNAC"],
            nodes=[
                GraphNode(name="LLM", engine="kv_cache", partition="LLM", replicas=[[0]], walks=["prefill", "decode"],
                          loops=["decode"]),
                GraphNode(name="snac_decoder", engine="stateless", partition="SNAC", replicas=[[0]],
                          walks=["snac_chunk"], loops=["snac_chunk"]),
            ],
            edges=[
                GraphEdge(name="tokens", into="LLM", modality="text", walks=["prefill"]),
                GraphEdge(name="audio_ids", source="LLM", into="snac_decoder", is_stream=True,
                          chunk="window 28, stride 7", walks=["prefill", *both]),
                GraphEdge(name="pcm", source="snac_decoder", modality="audio", walks=["snac_chunk"]),
            ],
            walks=[
                GraphWalk(name="prefill", partition="LLM", nodes=["LLM"]),
                GraphWalk(name="decode", partition="LLM", nodes=["LLM"]),
                GraphWalk(name="snac_chunk", partition="SNAC", nodes=["snac_decoder"]),
            ],
        ),
        edges=(Edge(name="audio_ids", source="LLM", into="snac_decoder", is_stream=True),),
    )  # fmt: skip


@dataclass(slots=True)
class Live:
    """A request on its way. steps: stages with the time when each begins and ends; side by side from `talk` on."""

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
    """Tells a watch: `frames(seconds)`. Holds the state that it told last in `store`."""

    def __init__(self, model: Model, *, seed: int = 7, requests: int = 17, hz: float = 4.0, uptime: float = 7860.0):
        self.model, self.hz = model, hz
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
        """The first two lines of a watch."""
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
        """(seconds since the start of the watch, frame)."""
        yield from ((0.0, frame) for frame in self.hello())
        begun = self.t
        for _ in range(round(seconds * self.hz)):
            yield from ((self.t - begun, frame) for frame in self.step())

    def step(self) -> list[Frame]:
        """The frames of one tick of 1/hz."""
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
        found: list[Frame] = [delta]
        if self.random.random() < 0.04:
            found.append(self._told("kv.preempt", {"request": self.live[0].id, "pages": 96, "why": "pool full"}))
        return found

    def _load(self) -> int:
        """Requests that are wanted now: a slow wave about `wanted`, so that curves have a shape."""
        return max(1, round(self.wanted * (1 + 0.3 * math.sin(self.t / 23) + 0.12 * math.sin(self.t / 5))))

    def lose(self, cause: dict[str, Any]) -> list[Frame]:
        """A worker dies: the cause in the head, an event."""
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
            if name in ("talk", "wav", "snac"):  # these run beside what feeds them
                feeder = request.plan[-1]
                begin = feeder[1] + self.random.uniform(0.05, 0.15)
                request.plan.append((stage, begin, max(feeder[2], begin) + 0.25))
            else:
                request.plan.append((stage, at, at + length))
                at += length
        self.live.append(request)

    def _request(self, r: Live) -> Request:
        has_ended = r.end <= self.t
        under_way = [stage for stage, begin, until in r.plan if begin <= self.t < until]
        done = [stage for stage, _, until in r.plan if until <= self.t]
        here = under_way[-1] if under_way else None
        decode = next((p for p in r.plan if p[0].tokens_s and p[1] <= self.t), None)
        wav = next((p for p in r.plan if p[0].audio_x and p[1] <= self.t), None)
        tokens = int((min(self.t, decode[2]) - decode[1]) * decode[0].tokens_s) if decode else 0
        is_waiting = self.t < r.admitted
        return Request(
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
        store.gpus = {str(gpu.index): gpu for gpu in self._gpus(store)}
        store.children = {child.name: child for child in self._children()}
        store.deployment = self._head(store)

    def _wobble(self, value: float, share: float = 0.08) -> float:
        return round(value * self.random.uniform(1 - share, 1 + share), 2)

    def _nodes(self, requests: dict[str, Request]) -> Iterator[Node]:
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
            yield Node(
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

    def _edges(self, requests: dict[str, Request]) -> Iterator[Edge]:
        for edge in self.model.edges:
            flow = sum(82 for r in requests.values() if any(s.node == edge.source and s.walk in r.active
                       for s in self.model.stages.values() if s.tokens_s))  # fmt: skip
            total = self.totals[edge.name]
            total[0] += flow / self.hz
            total[1] += flow / self.hz * 6144
            yield Edge(
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

    def _ranks(self, store: Store) -> Iterator[Rank]:
        for number in sorted({stage.rank for stage in self.model.stages.values()}):
            nodes = [node for node in store.nodes.values() if node.rank == number]
            is_gpu = bool(self.model.gpus)
            used = (63.4 if number == 0 else 14.9) * GIB if is_gpu else 1.2 * GIB
            yield Rank(
                rank=number,
                device=f"cuda:{number}" if is_gpu else "cpu",
                gpu=str(number) if is_gpu else None,
                state="ready",
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

    def _gpus(self, store: Store) -> Iterator[Gpu]:
        for index, name in enumerate(self.model.gpus):
            rank = store.ranks[str(index)]
            yield Gpu(
                index=index,
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

    def _children(self) -> Iterator[Child]:
        yield Child(name="api", state="ready", pid=4110, core=self._wobble(0.41), resident_bytes=210 * 2**20)
        yield Child(name="conductor", state="ready", pid=4111, core=self._wobble(0.12), resident_bytes=90 * 2**20)
        for number in sorted({stage.rank for stage in self.model.stages.values()}):
            yield Child(name=f"worker-{number}", state="ready", pid=4121 + number, rank=number, core=0.93)

    def _head(self, store: Store) -> Deployment:
        running = [r for r in store.requests.values() if r.state == "run"]
        firsts = sorted(r.ttft_ms for r in running if r.ttft_ms is not None)
        speaking = [r for r in running if "audio" in r.outputs and r.ttfa_ms]
        return Deployment(
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
        for name in ("ranks", "nodes", "requests", "edges", "gpus", "children"):
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

    # -- spans and logs -----------------------------------------------------------------------------------------

    def trace(self, r: Live) -> dict[str, Any]:
        """What the admin socket answers for a request's spans."""
        first = r.plan[0][1]
        spans = [span("compute", "parse", "", r.born, r.born + 0.012, child="api"),
                 span("queue", "admission", "", r.born + 0.012, min(self.t, r.admitted), child="conductor")]  # fmt: skip
        for stage, begin, until in r.plan:
            end = min(self.t, until)
            if begin > self.t:
                continue
            child = f"worker-{stage.rank}"
            spans.append(span("queue", stage.node, stage.walk, begin - 0.02, begin, child=child))
            if stage.audio_x:
                at = begin + 0.2
                while at < end:
                    spans.append(span("compute", stage.node, stage.walk, at, at + 0.016, child=child))
                    at += 0.28
            elif stage.tokens_s:
                steps = int((end - begin) * 1000 / stage.step_ms)
                spans.append(span("compute", stage.node, stage.walk, begin, end, child=child, count=steps, batch=14))
                stall = begin + 0.55 * (end - begin)
                spans.append(span("stall", stage.node, stage.walk, stall, stall + 0.03 * (end - begin), child=child))
            else:
                spans.append(span("compute", stage.node, stage.walk, begin, end, child=child, batch=3))
        for edge in self.model.edges:
            fed = next((p for p in r.plan if p[0].node == edge.into and p[1] < self.t), None)
            if fed is not None and edge.source_rank != edge.into_rank:
                spans.append(span("transfer", edge.name, "", fed[1] - 0.01, min(self.t, fed[2]), size_bytes=2_400_000,
                                  source_rank=edge.source_rank, into_rank=edge.into_rank))  # fmt: skip
        assert first >= r.born
        return {"id": r.id, "handle": r.handle, "spans": spans}

    def log_lines(self) -> list[dict[str, Any]]:
        """Lines as the processes write them: JSON, and now and then plain text of a native library."""
        newest = self.live[-1]
        clock = f"2026-11-21T08:{int(self.t / 60) % 60:02d}:{int(self.t) % 60:02d}.120Z"

        def said(source: str, level: str, message: str, request: str = "") -> dict[str, Any]:
            facts = {"time": clock, "level": level, "child": source, "message": message}
            return {"from": source, "line": json.dumps(facts | ({"request": request} if request else {}))}

        return [
            said("api", "INFO", f"admitted after {1000 * (newest.admitted - newest.born):.0f} ms", newest.id),
            said("conductor", "DEBUG", f"{len(self.live)} requests, {newest.prompt} tokens of prompt next"),
            said("worker-0", "INFO", f"prefill of {newest.prompt} tokens in 3 chunks", newest.id),
            *(
                [said("worker-0", "WARNING", "pool full: 96 pages taken back", newest.id)]
                if self.random.random() < 0.2
                else []
            ),
            *(
                [{"from": "worker-1", "line": "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"}]
                if self.random.random() < 0.1
                else []
            ),
        ]


def span(kind: str, node: str, walk: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """One span of a request, as the admin socket gives it."""
    return {"kind": kind, "node": node, "walk": walk, "start": round(start, 4), "end": round(end, 4), **more}


def record(path: Path, simulation: Simulation, seconds: float) -> None:
    """Write a recording with the spans of every request, as if each had been opened, and logs."""
    path.unlink(missing_ok=True)
    recorder = Recorder(path, simulation.model.name, at=0.0)
    second = -1
    for at, frame in simulation.frames(seconds):
        recorder.frame(at, encode(frame))
        if int(at) != second and at > seconds - 12:
            for facts in simulation.log_lines():
                recorder.log(at, facts)
        second = int(at)
    for r in simulation.live:
        recorder.answer(seconds, f"/v1/requests/{r.id}/trace?handle={r.handle}", simulation.trace(r))
    recorder.close()


def _keys(item: Any) -> dict[str, Any]:
    """The fields of an item that have no default."""
    return {name: getattr(item, name) for name in ("name", "rank", "id", "handle", "index")
            if name in item.__struct_fields__}  # fmt: skip


def lost() -> Simulation:
    """A deployment whose worker has just died."""
    return Simulation(qwen(), seed=3, requests=6, uptime=600.0)


CAUSE = {
    "time": EPOCH + 600,
    "child": "worker-0",
    "class": "OutOfMemoryError",
    "message": "CUDA out of memory: 2.0 GiB wanted, 0.4 of 79.1 GiB free",
    "rank": 0,
}


def starting() -> list[Frame]:
    """A deployment whose weights are being read."""
    head = Deployment(name="qwen3_omni", model="qwen3_omni", state="starting", phase="weights", done=int(41.8 * GIB),
                      total=int(62.1 * GIB), ranks=2, started=11.5, started_at=EPOCH)  # fmt: skip
    store = Store(rev=12, t=20.5, is_synced=True, deployment=head, graph=qwen_graph())
    store.ranks = {
        "0": Rank(
            rank=0, device="cuda:0", gpu="0", state="known", nodes=["audio_encoder", "vision_encoder", "Thinker"]
        ),
        "1": Rank(rank=1, device="cuda:1", gpu="1", state="known", nodes=["Talker", "Code2Wav"]),
    }
    store.gpus = {"0": Gpu(index=0, name="NVIDIA H100 80GB HBM3", util=0.02, memory_used=44 * GIB,
                           memory_total=int(79.1 * GIB), power_w=131, power_limit_w=700)}  # fmt: skip
    store.children = {
        "api": Child(name="api", state="known", pid=4110, phase="wait"),
        "conductor": Child(name="conductor", state="ready", pid=4111),
        "worker-0": Child(name="worker-0", state="known", pid=4121, rank=0, phase="weights", done=int(41.8 * GIB),
                          total=int(62.1 * GIB), detail="model-00009-of-00015.safetensors"),
        "worker-1": Child(name="worker-1", state="known", pid=4122, rank=1, phase="capture", done=17, total=24,
                          detail="Talker 16"),
    }  # fmt: skip
    return [HelloFrame(boot="boot-start", rev=12), store.snapshot()]


def write_recordings() -> None:
    """Make the recordings that tests and pictures use."""
    RECORDINGS.mkdir(exist_ok=True)
    record(RECORDINGS / "qwen3_omni.mstar.gz", Simulation(qwen(), hz=1.0), 300)
    record(RECORDINGS / "orpheus.mstar.gz", Simulation(orpheus(), hz=2.0, requests=9, uptime=95.0), 30)
    broken = lost()
    recorder = Recorder(RECORDINGS / "lost.mstar.gz", "qwen3_omni", at=0.0)
    for at, frame in broken.frames(5):
        recorder.frame(at, encode(frame))
    for frame in broken.lose(CAUSE):
        recorder.frame(5.25, encode(frame))
    recorder.close()


if __name__ == "__main__":
    write_recordings()
