"""Messages between the supervisor and its children: peers, start-up phases, heartbeats, drain and stop."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.messages.telemetry import EdgeNews, MetricSample, RequestNews, SessionNews, Span


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", omit_defaults=True):
    """Child to supervisor: registration, repeated until the child receives PeerUp with its own name.

    fd_endpoint: socket that hands out its shared memory. host: name of its host, empty for the supervisor's.
    remote_endpoint, blob_endpoint: at which processes of other hosts reach its mailbox and its shared memory; empty if
    the deployment has one host.
    """

    name: str
    incarnation: int
    pid: int
    endpoint: str
    fd_endpoint: str = ""
    host: str = ""
    remote_endpoint: str = ""
    blob_endpoint: str = ""


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase", omit_defaults=True):
    """Child to supervisor: a start-up phase or its progress: fetch, weights, kv, pool, ready.

    done, total: bytes, or the unit in `detail`. facts: capacity of the process, with `ready`.
    """

    name: str
    incarnation: int
    phase: str
    done: int = 0
    total: int = 0
    detail: str = ""
    facts: dict[str, Any] = {}


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Child to supervisor: heartbeat, each second. Ready work without steps is a hang.

    work_ready: whether work is waiting. steps: number of steps so far.
    """

    name: str
    incarnation: int
    work_ready: bool = False
    steps: int = 0


class PeerUp(msgspec.Struct, frozen=True, kw_only=True, tag="peer_up", omit_defaults=True):
    """Supervisor to everyone: this process accepts messages. Fields as in Hello.

    The receiver uses `endpoint` and `fd_endpoint` for a peer of its own host, else the two others.
    """

    name: str
    incarnation: int
    endpoint: str
    fd_endpoint: str = ""
    host: str = ""
    remote_endpoint: str = ""
    blob_endpoint: str = ""


class PeerDown(msgspec.Struct, frozen=True, kw_only=True, tag="peer_down", omit_defaults=True):
    """Supervisor to everyone: this process has ended. cause: one sentence for operators; public: one for clients.

    is_excused: no request can be the cause: the supervisor has ended it for a restart, or its host was lost.
    """

    name: str
    incarnation: int
    cause: str
    public: str = "a process died"
    is_excused: bool = False


class PeerReady(msgspec.Struct, frozen=True, kw_only=True, tag="peer_ready", omit_defaults=True):
    """Supervisor to api and conductor: this worker finished its start and takes work. facts: its capacity."""

    name: str
    incarnation: int
    facts: dict[str, Any] = {}


class ServiceState(msgspec.Struct, frozen=True, kw_only=True, tag="service_state", omit_defaults=True):
    """Supervisor to api: state of the deployment, after each change and to each new api.

    state: starting, ready, draining or unhealthy. reason: why not ready, for clients. drain, pause, handover: number of
    the one in progress, 0 without one; new requests are then refused, or wait in the queue, or wait with their
    connections in the listening socket for the next api. The three share one counter.
    """

    state: str
    phase: str = ""
    reason: str = ""
    drain: int = 0
    pause: int = 0
    handover: int = 0


class Cordon(msgspec.Struct, frozen=True, kw_only=True, tag="cordon", omit_defaults=True):
    """Supervisor to conductor: all cordoned ranks, after each change and to each new conductor.

    number: of this message. ranks: they get new requests only if no other replica is ready. evict: those whose requests
    end now, as if their workers had died, because the drain limit is reached.
    """

    number: int
    ranks: list[int] = []
    evict: list[int] = []


class Cordoned(msgspec.Struct, frozen=True, kw_only=True, tag="cordoned", omit_defaults=True):
    """Conductor to supervisor: the cordoned ranks without requests, after each Cordon and each change.

    number: of the latest Cordon.
    """

    number: int
    ranks: list[int] = []


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Supervisor to child: heartbeat, each second. A child that misses ten ends itself."""

    seq: int


class LinkBroken(msgspec.Struct, frozen=True, kw_only=True, tag="link_broken"):
    """Child to supervisor: messages of a process of another host were lost, or none come.

    None that follow lost ones are taken. peer, incarnation: their sender. lost: how many until it was noticed.
    silent_s: seconds in which nothing came, not even marks; 0 for lost messages.
    """

    peer: str
    incarnation: int
    lost: int = 0
    silent_s: float = 0.0


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Api to supervisor: all requests have ended; for a pause, all that ran.

    drain: number of the drain, pause or handover that has ended with them.
    """

    drain: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Supervisor to child: shut down cleanly."""

    reason: str = ""


class LogLevel(msgspec.Struct, frozen=True, kw_only=True, tag="log_level"):
    """Supervisor to child: set the log level until the process ends."""

    level: str


class Reload(msgspec.Struct, frozen=True, kw_only=True, tag="reload"):
    """Supervisor to api and conductor: the run directory's spec has changed.

    The api reads the keys, the certificate and the live limits from it, the conductor the placement.
    """


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag="telemetry", omit_defaults=True):
    """Child to supervisor: gauges, counters, requests, spans and edges, at most every 100 ms. No client text.

    values: changed values by flat name, absolute, such as "worker-0.LLM.pages_used". events: (type, facts). dropped:
    spans dropped since the start of the process. samples: metrics, at most once a second: the api sends changed ones,
    the supervisor all that the api shows of it. at: the sender's monotonic clock, which all its times belong to, when
    it was sent. sessions: all that are open, from the api; None: unchanged.
    """

    name: str
    incarnation: int
    at: float = 0.0
    values: dict[str, float] = {}
    requests: list[RequestNews] = []
    spans: list[Span] = []
    edges: list[EdgeNews] = []
    events: list[tuple[str, dict[str, Any]]] = []
    dropped: int = 0
    samples: list[MetricSample] = []
    sessions: list[SessionNews] | None = None


LifeMessage = (
    Hello
    | Phase
    | Beat
    | PeerUp
    | PeerDown
    | PeerReady
    | ServiceState
    | Cordon
    | Cordoned
    | Ping
    | LinkBroken
    | Drained
    | Stop
    | LogLevel
    | Reload
    | Telemetry
)
