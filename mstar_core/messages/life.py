"""Life of processes: supervisor <-> every child. Who is there, what phase a start is in, beats, drain and stop."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.messages.telemetry import EdgeNews, MetricSample, RequestNews, Span


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Child to supervisor, repeated until PeerUp of itself comes back.

    fd_endpoint: where its shared memory is handed out.
    """

    name: str
    incarnation: int
    pid: int
    endpoint: str
    fd_endpoint: str = ""


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase", omit_defaults=True):
    """Child to supervisor: a start-up phase, or progress in one: fetch, weights, kv, pool, ready.

    done, total: bytes, or what `detail` says. facts: with `ready`, what the process can hold.
    """

    name: str
    incarnation: int
    phase: str
    done: int = 0
    total: int = 0
    detail: str = ""
    facts: dict[str, Any] = {}


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Child to supervisor, each second. A hang is ready work and no steps.

    work_ready: work is waiting. steps: steps so far.
    """

    name: str
    incarnation: int
    work_ready: bool = False
    steps: int = 0


class PeerUp(msgspec.Struct, frozen=True, kw_only=True, tag="peer_up"):
    """Supervisor to everyone: this process can be spoken to."""

    name: str
    incarnation: int
    endpoint: str
    fd_endpoint: str = ""


class PeerDown(msgspec.Struct, frozen=True, kw_only=True, tag="peer_down"):
    """Supervisor to everyone: this process is gone. cause: one sentence for people."""

    name: str
    incarnation: int
    cause: str


class PeerReady(msgspec.Struct, frozen=True, kw_only=True, tag="peer_ready", omit_defaults=True):
    """Supervisor to api and conductor: this worker finished its start and may be given work. facts: its capacity."""

    name: str
    incarnation: int
    facts: dict[str, Any] = {}


class ServiceState(msgspec.Struct, frozen=True, kw_only=True, tag="service_state", omit_defaults=True):
    """Supervisor to api: state of the deployment: starting ready draining unhealthy. reason: why not ready."""

    state: str
    phase: str = ""
    reason: str = ""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Supervisor to child, each second: a child that misses ten has lost its supervisor and ends."""

    seq: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Supervisor to api: refuse new requests (True) or take them again (False)."""

    on: bool = True


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Api to supervisor: no request is left."""

    in_flight: int = 0


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Supervisor to child: end now, cleanly."""

    reason: str = ""


class LogLevel(msgspec.Struct, frozen=True, kw_only=True, tag="log_level"):
    """Supervisor to child: log from this level on, until the process ends."""

    level: str


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, tag="telemetry", omit_defaults=True):
    """Child to supervisor, at most every 100 ms: gauges, counters, news of requests, spans, edges. No client text.

    values: flat name -> number, absolute, e.g. "worker-0.LLM.pages_used"; those that changed. events: (type, facts).
    dropped: spans that were too many to send, since the process began. samples: of the api's metrics, at most once a
    second, those that changed.
    """

    name: str
    incarnation: int
    values: dict[str, float] = {}
    requests: list[RequestNews] = []
    spans: list[Span] = []
    edges: list[EdgeNews] = []
    events: list[tuple[str, dict[str, Any]]] = []
    dropped: int = 0
    samples: list[MetricSample] = []


LifeMessage = (
    Hello
    | Phase
    | Beat
    | PeerUp
    | PeerDown
    | PeerReady
    | ServiceState
    | Ping
    | Drain
    | Drained
    | Stop
    | LogLevel
    | Telemetry
)
