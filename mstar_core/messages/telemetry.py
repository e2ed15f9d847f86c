"""Parts of `Telemetry`: changes of requests, spans, metric samples, edges and sessions. No client text.

Times are seconds of CLOCK_MONOTONIC, one clock for all processes of a host.
"""

from __future__ import annotations

from typing import Final

import msgspec

REALTIME: Final = "realtime"
"""Kind of sessions that listen and speak."""


class RequestNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of one request in one process. None: unchanged, or not known to this process.

    handle: of the attempt that the process runs; the api sends that of the first attempt. After a death it also sends
    `current`, the handle of the current attempt, the number of attempts, the pauses between them, and their causes.
    The api sends id, route, modalities, state, times to the first output and audio, usage, the end, the control loop
    that the client names (`period_ms`, `skipped_ticks`), and `parent`, the id of the HTTP request of which it is a
    part. `audio_s`, `images` and `video_s` are made, `audio_in_s` is heard. The conductor sends the running walks
    (`active`), the finished ones, the position of the request (node, walk, rank) and the reason for the choice of its
    replicas (`placed`, empty without a choice). A worker sends sampled ids (`tokens`), pages that it holds, the reason
    of a wait, and of a loop that reports its progress (`step`, `steps`) its speed in steps per second.
    state: prepare, queue, run, resume, finished, failed, cancelled. error: a code. message: the sentence that the
    client got.
    """

    handle: int
    id: str | None = None
    parent: str | None = None
    route: str | None = None
    inputs: list[str] | None = None
    outputs: list[str] | None = None
    period_ms: float | None = None
    skipped_ticks: int | None = None
    state: str | None = None
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    message: str | None = None
    ttft_s: float | None = None
    ttfa_s: float | None = None
    audio_s: float | None = None
    audio_in_s: float | None = None
    images: int | None = None
    video_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    pages: int | None = None
    step: int | None = None
    steps: int | None = None
    step_rate: float | None = None
    why: str | None = None
    node: str | None = None
    walk: str | None = None
    rank: int | None = None
    active: list[str] | None = None
    walks: dict[str, int] | None = None
    placed: str | None = None
    current: int | None = None
    attempts: int | None = None
    pauses_s: list[float] | None = None
    causes: list[str] | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Time that one request spent on one activity. Encoded as an array.

    key: number of the span within its process; a later span with the same key replaces it (an open span).
    kind: compute, queue, wait or transfer. node: of the graph, or the edge of a transfer, or a step of the api.
    count: steps, task runs or items. batch: items of the last step. size_bytes: moved by a transfer.
    busy_s: time in the activity; a span of several steps is longer than they are. None: all of it.
    device_s: of a computation, its steps divided among the jobs of each, so that the spans of all requests add up to
    the time in steps of the rank; 0 for what runs on no device.
    """

    key: int
    handle: int
    kind: str
    node: str
    walk: str
    start: float
    end: float
    count: int = 1
    batch: int = 0
    size_bytes: int = 0
    is_open: bool = False
    busy_s: float | None = None
    device_s: float = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds in the activity."""
        return self.end - self.start if self.busy_s is None else self.busy_s


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a Prometheus family (observe/families.py). Encoded as an array.

    labels: values in the order of the family's label names; a histogram bucket adds its upper bound.
    """

    name: str
    labels: list[str]
    value: float


class EdgeNews(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one edge since the start of the process. Encoded as an array.

    items, size_bytes: transferred so far. transfers, transfer_s: number of timed messages and their total time.
    """

    name: str
    source: str
    into: str
    source_rank: int
    into_rank: int
    is_stream: bool
    items: int
    size_bytes: int
    transfers: int = 0
    transfer_s: float = 0.0


class SessionNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of one session of a client.

    kind: `realtime`, or `chat` for requests with a `session_id`. speaks: `user`, `model`, `interrupted` (the user, over
    an answer that this stopped), `thinking` (an answer has no output yet) or `silence`. is_lost: a realtime session
    without a connection, which is kept for a while. answers: responses, or requests, begun. items: of the conversation.
    request: id of the latest request.
    first_audio_s: from the end of the last turn to the first sound of its answer. used: end of the last request.
    lease_s: time after that for which its cached pages are kept.
    """

    id: str
    kind: str
    speaks: str
    began: float
    is_lost: bool = False
    answers: int = 0
    running: int = 0
    interrupts: int = 0
    false_starts: int = 0
    items: int = 0
    request: str = ""
    first_audio_s: float | None = None
    used: float | None = None
    lease_s: float = 0.0
