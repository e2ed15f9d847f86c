"""What processes tell the supervisor of their requests: facts, spans, edges. Parts of `Telemetry`; no client text.

Times are seconds of CLOCK_MONOTONIC, one clock for all processes of a host.
"""

from __future__ import annotations

import msgspec


class RequestNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one process knows newly of one request. None: unchanged, or not known to this process.

    The api tells id, route, modalities, state, times to the first output and sound, what was used, and the end;
    the conductor tells the walks under way (`active`), those done and where the request is (node, walk, rank);
    a worker tells ids drawn here so far (`tokens`), pages held, seconds waited, and what it waits for.
    state: prepare, queue, run, finished, failed, cancelled. error: a code.
    """

    handle: int
    id: str | None = None
    route: str | None = None
    inputs: list[str] | None = None
    outputs: list[str] | None = None
    state: str | None = None
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    ttft_s: float | None = None
    ttfa_s: float | None = None
    audio_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    waited_s: float | None = None
    pages: int | None = None
    why: str | None = None
    node: str | None = None
    walk: str | None = None
    rank: int | None = None
    active: list[str] | None = None
    walks: dict[str, int] | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Time that one request spent on one thing. Travels as an array.

    key: number of the span within its process; the same key again replaces it (an open span that went on).
    kind: compute, queue, transfer or stall. node: of the graph, or the edge of a transfer, or a step of the api.
    count: steps, firings or items. batch: rows of the last step. size_bytes: moved by a transfer.
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


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a Prometheus family (observe/families.py). Travels as an array.

    labels: values in the order of the family's label names; of a histogram's bucket its upper bound comes last.
    """

    name: str
    labels: list[str]
    value: float


class EdgeNews(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one edge since the process began. Travels as an array.

    items, size_bytes: what went over it. transfers, transfer_s: messages whose way was timed, and their sum.
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
