"""Frames of the admin socket's watch: one JSON object per line, made by the hub and read by `mstarctl`.

Base units: seconds, milliseconds if the name ends in `_ms`, bytes, shares from 0 to 1. The times `t`, `started` and
`ended` are seconds of the deployment's monotonic clock; a frame's `t` is its current time. None: unknown.
Within an API version fields are only added, and readers ignore unknown fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

API: Final = 1
MIN_API: Final = 1
"""Major versions of the admin socket: the current one, and the oldest that is supported."""

BEAT_S: Final = 2.0
SNAPSHOT_REQUESTS: Final = 2000
SNAPSHOT_EVENTS: Final = 200
"""Most requests, and events, in a snapshot."""

GRAPH_FACT: Final = "graph"
"""Name of the fact of the conductor's `ready` phase that carries the graph to the supervisor."""

LOCAL: Final = "local"
"""Key of the supervisor's host in `hosts`; objects on it have an empty `host`."""


class DeploymentStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head: identity, state, cause and totals of a deployment.

    state: starting, ready, degraded, sleeping, draining, stopping, failed, unhealthy. phase: the slowest current
    start-up phase, with `done` of `total`; of a wake in bytes. running, waiting: requests; slots, queue_limit: their
    limits. ttft, ttfa, latency (of whole requests): of the last minute. audio_x: seconds of audio generated per second.
    cause: record of the failure that the deployment suffers from, none once it is ready again or was stopped. cordoned:
    ranks whose replicas get no new requests. failures: the newest ones, also after they are over, oldest first: name,
    message, detail, time (seconds since the epoch) and log. last_failure: the last of them. hosts: number of hosts, 0
    for the supervisor's alone. sessions: those of clients that have not ended. realtime_sessions: open, or waiting for
    their client; realtime_interrupts: of their answers by speech since the api started. pages_leased: cached pages
    under the leases of sessions. asleep: nodes that sleep; sleep_level: 1 or 2, 0 if none does. given_back_bytes: of
    the devices of all ranks. wakes: number of them; slept_at, woke_at: of the last sleep and wake (seconds since the
    epoch).
    """

    name: str
    model: str = ""
    plugin: str = ""
    state: str = "starting"
    reason: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    endpoint: str = ""
    pid: int = 0
    log_dir: str = ""
    started: float = 0.0
    started_at: float = 0.0
    ready_s: float | None = None
    ranks: int = 0
    hosts: int = 0
    cordoned: list[int] = []
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    preparing: int = 0
    slots: int = 0
    queue_limit: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    requests_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    ttfa_p50_ms: float | None = None
    ttfa_p99_ms: float | None = None
    latency_p50_ms: float | None = None
    tokens_s: float = 0.0
    audio_x: float = 0.0
    pages_used: int = 0
    pages_total: int = 0
    pages_leased: int = 0
    preempted: int = 0
    sessions: int = 0
    realtime_sessions: int = 0
    realtime_interrupts: int = 0
    cause: dict[str, Any] | None = None
    last_failure: dict[str, Any] | None = None
    failures: list[dict[str, Any]] = []
    asleep: list[str] = []
    sleep_level: int = 0
    given_back_bytes: int = 0
    wakes: int = 0
    slept_at: float | None = None
    woke_at: float | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. device: `cpu` or `cuda:INDEX`; gpu: key in `gpus`, if any. state: of its child process, or
    `cordoned`, or `sleeping` if all its nodes sleep. host: key in `hosts`, empty for `local`.

    busy: share of time in steps; that of a follower is its leader's. core: share of one CPU core. memory: used by this
    process on its device, weights and caches included; the device of `cpu` is the host. shm: its shared memory in use.
    follows: nodes of which it computes a share for the leader of its tensor-parallel group. group: ranks of that group,
    the leader first; epoch: starts of the group; plans: frames of plans that a follower has carried out.
    asleep: nodes that sleep; given_back_bytes: of the device; kept_bytes: of host memory, for their weights.
    """

    rank: int
    host: str = ""
    device: str = "cpu"
    gpu: str | None = None
    state: str = ""
    pid: int | None = None
    nodes: list[str] = []
    requests: int = 0
    steps_s: float = 0.0
    busy: float = 0.0
    core: float | None = None
    resident_bytes: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    weights_bytes: int | None = None
    cache_bytes: int | None = None
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    pages_leased: int = 0
    shm_bytes: int = 0
    follows: list[str] = []
    group: list[int] = []
    epoch: int = 0
    plans: int = 0
    asleep: list[str] = []
    given_back_bytes: int = 0
    kept_bytes: int = 0


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node on one rank; its key is `NODE@RANK`.

    batch: sequences or jobs in the last step. step_ms: mean of the last second; p50 and p99 of the last 256 steps.
    queue: those that are ready to run; waiting: jobs without a slot or pages. walks: walk -> requests in it here.
    graph_share: share of steps replayed from a CUDA graph, None without graphs; eager: steps run without one, by kind.
    captured: CUDA graphs; planned: those that are not captured yet.
    busy: share of time in steps. ranks: of the tensor-parallel group that runs it, the leader first; empty without one.
    ahead_s: least audio buffered by a listener; underruns: how often a buffer was empty.
    """

    name: str
    rank: int
    partition: str = ""
    batch: int = 0
    step_ms: float | None = None
    step_p50_ms: float | None = None
    step_p99_ms: float | None = None
    steps_s: float = 0.0
    rows_s: float = 0.0
    tokens_s: float = 0.0
    queue: int = 0
    waiting: int = 0
    walks: dict[str, int] = {}
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    pages_leased: int = 0
    slots_used: int = 0
    slots_total: int = 0
    preempted: int = 0
    graph_share: float | None = None
    eager: dict[str, int] = {}
    captured: int = 0
    planned: int = 0
    busy: float = 0.0
    ranks: list[int] = []
    is_bottleneck: bool = False
    ahead_s: float | None = None
    underruns: int | None = None


class EdgeStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stream, or an edge that crosses ranks; its key is `NAME@FROM>TO` with the two ranks.

    items, bytes: counters since the start. source, into: nodes. transfer_ms: mean of the last second.
    """

    name: str
    source: str = ""
    into: str = ""
    source_rank: int = 0
    into_rank: int = 0
    is_stream: bool = False
    items: int = 0
    bytes: int = 0
    items_s: float = 0.0
    bytes_s: float = 0.0
    transfer_ms: float | None = None


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request; its key is the handle as text. id: chosen by the client. parent: id of the HTTP request of which it
    is a part, such as one of several answers or a turn of a conversation; empty for a whole one.

    state: prepare, queue, run, resume, then finished, failed or cancelled. inputs, outputs: modalities. node, rank: its
    current place (None in the queue); host: key in `hosts` of that rank, empty for `local`; walk: the walk there.
    active: walks in progress; walks: walk -> completed runs.
    waited_ms: part of its time in queues, in which nothing of it ran. step, steps, step_rate: progress of a step loop,
    such as the denoising of an image: steps done, all steps, steps per second. why: reason of the wait. error: code.
    message: the sentence of the error, as the client got it.
    audio_s, images, video_s: made; audio_in_s: seconds of audio in its inputs. device_s: its share of the time in steps
    of all ranks that computed for it, of work that has ended.
    ttft, ttfa: time to the first output, and to the first audio. placed: reason for the choice of its replicas.
    period_ms: of the client's control loop, if the client names it; its answer is due within one period.
    skipped_ticks: ticks without a request since the client's previous one, if the client counts them.
    attempts: number of them, 0 before a death has ended one; causes: those deaths; pauses_s: of its outputs.
    """

    id: str
    handle: int
    parent: str = ""
    route: str = ""
    model: str = ""
    inputs: list[str] = []
    outputs: list[str] = []
    state: str = "prepare"
    node: str | None = None
    rank: int | None = None
    host: str = ""
    walk: str | None = None
    started: float = 0.0
    ended: float | None = None
    ttft_ms: float | None = None
    ttfa_ms: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    audio_s: float = 0.0
    audio_in_s: float = 0.0
    images: int = 0
    video_s: float = 0.0
    device_s: float = 0.0
    waited_ms: float = 0.0
    pages: int = 0
    step: int = 0
    steps: int = 0
    step_rate: float = 0.0
    active: list[str] = []
    walks: dict[str, int] = {}
    why: str = ""
    error: str = ""
    message: str = ""
    placed: str = ""
    period_ms: float | None = None
    skipped_ticks: int | None = None
    attempts: int = 0
    pauses_s: list[float] = []
    causes: list[str] = []

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended."""
        return self.ended is not None

    def age_s(self, t: float) -> float:
        """Return the seconds from its start to `t`, or to its end."""
        return max(0.0, (t if self.ended is None else self.ended) - self.started)

    def is_late(self, t: float) -> bool:
        """Return whether it missed the tick after its own: it runs longer than the client's period, or it failed."""
        return self.period_ms is not None and (bool(self.error) or 1000 * self.age_s(t) > self.period_ms)

    def passed_ticks(self, t: float) -> int:
        """Return how many ticks of the client's loop have passed while it runs, without the tick that sent it."""
        if self.period_ms is None:
            return 0
        return max(0, math.ceil(round(1000 * self.age_s(t) / self.period_ms, 6)) - 1)

    def missed_ticks(self, t: float) -> int | None:
        """Return the ticks that it missed: that of a late answer, and those that passed meanwhile. None: no period."""
        return None if self.period_ms is None else self.is_late(t) + self.passed_ticks(t)

    @property
    def progress(self) -> str:
        """Return the progress of its step loop, `step 23 of 49, 5.2/s`, or nothing."""
        rate = f", {self.step_rate:.1f}/s" if self.step_rate and not self.has_ended else ""
        return f"step {self.step} of {self.steps}{rate}" if self.steps else ""

    @property
    def resumption(self) -> str:
        """See the function `resumption`."""
        return resumption(self.causes, self.pauses_s)

    def rtf(self, t: float) -> float | None:
        """Return the real-time factor: seconds per second of audio; None without audio."""
        return self.age_s(t) / self.audio_s if self.audio_s > 0 else None


def resumption(causes: Sequence[str], pauses_s: Sequence[float]) -> str:
    """Return the current attempt of a request after deaths of processes, `attempt 2, paused 1.9 s`, or nothing."""
    paused = f", paused {sum(pauses_s):.1f} s" if pauses_s else ""
    return f"attempt {len(causes) + 1}{paused}" if causes else ""


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU. Its key is the index as text, `HOST/INDEX` on another host than the supervisor's.

    host: key in `hosts`, empty for `local`. index: on that host. is_stale: readings more than a few seconds old.

    pcie_in_s, pcie_out_s: bytes per second, of two GPUs in turn each second. fan: share of its speed. throttle: reasons
    why its clock is lowered. ecc_errors: uncorrected memory errors since the start of the driver. is_mig: it is split
    into instances. processes: pid -> name and memory in bytes of each process that computes on it.
    """

    index: int
    host: str = ""
    uuid: str = ""
    name: str = ""
    util: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    pcie_in_s: int | None = None
    pcie_out_s: int | None = None
    fan: float | None = None
    throttle: list[str] = []
    ecc_errors: int | None = None
    is_mig: bool = False
    processes: dict[str, tuple[str, int]] = {}
    ranks: list[int] = []
    is_stale: bool = False


class HostStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host with its loads; its key is `local` for the supervisor's, else its name.

    cores: share of the last second in which each core was busy. net: bytes per second of all interfaces but the
    loopback. disk: bytes per second of all disks.

    Of a deployment with several hosts: title: host name. address: at which the others reach it. node: Ray's id. state:
    `starting` (its agent starts), `ready`, `lost` (its agent is silent) or `waiting` (for room in the cluster); reason:
    why it is lost, or what it waits for. pid: of its agent; incarnation: of that, from 1. heard: time of its last
    reading; the loads are as old. round_trip_ms: from the supervisor to the agent and back. versions: of mstarctl,
    plugins, ray and python by distribution name, `cuda` of the driver.
    """

    title: str = ""
    address: str = ""
    node: str = ""
    state: str = ""
    reason: str = ""
    pid: int | None = None
    incarnation: int = 0
    heard: float | None = None
    round_trip_ms: float | None = None
    versions: dict[str, str] = {}
    cores: list[float] = []
    memory_used: int = 0
    memory_total: int = 0
    swap_used: int = 0
    swap_total: int = 0
    net_in_s: int = 0
    net_out_s: int = 0
    disk_read_s: int = 0
    disk_write_s: int = 0


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One session of a client; its key is its id behind its kind, `realtime/sess_1`.

    kind: `realtime`, or `chat` for requests with a `session_id`. speaks: `user`, `model`, `interrupted` (the user, over
    an answer that this stopped), `thinking` (an answer has no output yet), `silence`. is_lost: it waits for its client
    to connect again. answers: begun; running: requests. false_starts: detected speech of less than 0.2 s. items: of the
    conversation. first_audio_ms: from the end of the last turn to the first sound of its answer. lease_ends: time until
    which its cached pages are kept if it stays idle; None: it has had no request yet. request: id of the latest one;
    empty for chats.
    """

    id: str = ""
    kind: str = "realtime"
    speaks: str = "silence"
    began: float = 0.0
    is_lost: bool = False
    answers: int = 0
    running: int = 0
    interrupts: int = 0
    false_starts: int = 0
    items: int = 0
    request: str = ""
    first_audio_ms: float | None = None
    lease_ends: float | None = None


class ChildStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process; its key is its name. state: spawned, known, ready, ended. phase: of its start, `done` of `total`.

    host: key in `hosts`, empty for `local`. core: share of one CPU core. restarts: since the deployment began.
    """

    name: str
    host: str = ""
    state: str = ""
    pid: int | None = None
    rank: int | None = None
    incarnation: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    detail: str = ""
    phases_s: dict[str, float] = {}
    facts: dict[str, Any] = {}
    restarts: int = 0
    core: float | None = None
    resident_bytes: int | None = None


class NodeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node of the model's graph. replicas: its placements, each a list of ranks. loops: walks that iterate it."""

    name: str
    engine: str = ""
    partition: str = ""
    replicas: list[list[int]] = []
    walks: list[str] = []
    loops: list[str] = []


class EdgeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A route of the graph. An empty source or into is the client; then `modality` is set.

    chunk: description of a stream's chunk policy.
    """

    name: str
    source: str = ""
    into: str = ""
    modality: str = ""
    is_stream: bool = False
    chunk: str = ""
    walks: list[str] = []


class WalkView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A walk: the nodes that it visits, in order."""

    name: str
    partition: str = ""
    nodes: list[str] = []


class GraphView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The served model's graph with its placement. Fixed for the life of a deployment; empty until it is known."""

    model: str = ""
    partitions: list[str] = []
    nodes: list[NodeView] = []
    edges: list[EdgeView] = []
    walks: list[WalkView] = []


Part: TypeAlias = Literal["ranks", "nodes", "requests", "edges", "gpus", "children", "hosts", "sessions"]
PARTS: Final[tuple[Part, ...]] = ("ranks", "nodes", "requests", "edges", "gpus", "children", "hosts", "sessions")
"""The keyed parts of the state. `deployment` is one object, and `events` have their own frames."""

Item: TypeAlias = (
    RankStatus | NodeStatus | RequestStatus | EdgeStatus | GpuStatus | ChildStatus | HostStatus | SessionStatus
)
ITEM_TYPES: Final[dict[str, type[Item]]] = {
    "ranks": RankStatus,
    "nodes": NodeStatus,
    "requests": RequestStatus,
    "edges": EdgeStatus,
    "gpus": GpuStatus,
    "children": ChildStatus,
    "hosts": HostStatus,
    "sessions": SessionStatus,
}

COUNTERS: Final[dict[str, frozenset[str]]] = {"edges": frozenset({"items", "bytes"})}
"""Fields that a delta adds to (`add`) instead of replacing."""


class HelloFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="hello"):
    """First line of a watch. boot: id of this start of the deployment; a new one clears the client's state.

    hz: the granted rate. readonly: the peer has read permission only.
    """

    api: int = API
    min_api: int = MIN_API
    boot: str = ""
    hz: float = 4.0
    rev: int = 0
    readonly: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A life-cycle event, numbered from 1 in a deployment. time: seconds since the epoch.

    On the wire the facts are merged into the other fields. Common facts: child, rank, node, request, why, cause.
    """

    n: int
    type: str
    time: float = 0.0
    t: float = 0.0
    rev: int = 0
    facts: dict[str, Any] = {}

    def flat(self) -> dict[str, Any]:
        """Return the event as a flat record, as in lists of events."""
        return {"n": self.n, "time": self.time, "type": self.type, **self.facts}


class SnapshotFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="snapshot", omit_defaults=True):
    """The whole state. Parts that were not selected are empty. truncated: part -> objects left out.

    events: the newest ones, oldest first, as flat records.
    """

    rev: int
    t: float
    deployment: DeploymentStatus | None = None
    graph: GraphView = GraphView()
    ranks: dict[str, RankStatus] = {}
    nodes: dict[str, NodeStatus] = {}
    requests: dict[str, RequestStatus] = {}
    edges: dict[str, EdgeStatus] = {}
    gpus: dict[str, GpuStatus] = {}
    children: dict[str, ChildStatus] = {}
    hosts: dict[str, HostStatus] = {}
    sessions: dict[str, SessionStatus] = {}
    events: list[dict[str, Any]] = []
    truncated: dict[str, int] = {}


class DeltaFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="delta", omit_defaults=True):
    """Changes since the frame with revision `after` (-1: not sent by the server).

    set: part -> key -> changed fields; an unknown key is a new object. delete (`del`): part -> keys.
    add: part -> key -> counter -> increase. deployment: changed fields of the head. graph, truncated: only if changed.
    """

    rev: int
    t: float
    after: int = -1
    deployment: dict[str, Any] = {}
    set: dict[str, dict[str, dict[str, Any]]] = {}
    delete: dict[str, list[str]] = msgspec.field(default_factory=dict, name="del")
    add: dict[str, dict[str, dict[str, int]]] = {}
    graph: GraphView | None = None
    truncated: dict[str, int] | None = None


class EventFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One event; written flat, `{"k": "event", "rev": .., "t": .., "n": .., "type": .., FACTS}`."""

    rev: int
    t: float
    event: Event


class BeatFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="beat"):
    """Heartbeat: nothing changed for two seconds."""

    rev: int
    t: float


class ResyncFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", tag="resync"):
    """This reader missed events (why: `slow`); a snapshot follows."""

    rev: int
    why: str = "slow"


StateFrame: TypeAlias = HelloFrame | SnapshotFrame | DeltaFrame | BeatFrame | ResyncFrame
Frame: TypeAlias = StateFrame | EventFrame


def encode(frame: Frame) -> bytes:
    """Encode one line of a watch, with its newline. msgspec escapes all other line breaks."""
    if isinstance(frame, EventFrame):
        event = frame.event
        flat = {
            **event.facts,
            "k": "event",
            "rev": frame.rev,
            "t": frame.t,
            "n": event.n,
            "time": event.time,
            "type": event.type,
        }
        return msgspec.json.encode(flat, enc_hook=str) + b"\n"
    return msgspec.json.encode(frame, enc_hook=str) + b"\n"
