"""Request log of the supervisor: merges the reports of all processes about live requests and those that ended.

Bounded: 2000 ended requests, 200 spans of each and 40,000 of all, and the sums of all spans. Read by the admin socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from mstar_core.messages.life import Telemetry
from mstar_core.messages.names import API, CONDUCTOR, rank_of
from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.observe.frames import GraphView, RequestStatus
from mstar_core.observe.parts import QUEUE, Part, parts
from mstar_core.observe.rates import Minute
from mstar_core.observe.waits import with_waits

ENDED: Final = 2000
SPANS: Final = 200
ENDED_SPANS: Final = 40_000
"""Spans of all ended requests, 570 bytes each. The oldest requests lose theirs first; their sums stay."""

LINGER_S: Final = 3.0
"""Time after the end of a request in which its last spans arrive."""

QUEUED_S: Final = 1.0
"""Most age of the time in queues of live requests, which change many times a second, in the view of watchers."""

SHOWN: Final = 500
"""Ended requests in the view of watchers. The oldest leaves first, one that failed after all others."""

ORPHAN_S: Final = 30.0
"""Time after which reports about a request that the api has not named are dropped."""

_NONE: Final = RequestNews(handle=0)

HostOf: TypeAlias = Callable[[int], str]
"""Returns the host of a rank, empty for the supervisor's."""


RanksOf: TypeAlias = Callable[[int | None, str], int]
"""Returns the number of ranks that compute a node together with a rank: those of its tensor-parallel group."""

COMPUTE: Final = "compute"


def only_here(rank: int) -> str:
    """Place every rank on the supervisor's host."""
    return ""


@dataclass(slots=True)
class SpanSum:
    """Totals of all spans of one kind at one place, dropped spans included. busy_s, device_s: see Span."""

    spans: int = 0
    count: int = 0
    busy_s: float = 0.0
    device_s: float = 0.0
    start: float = 0.0
    end: float = 0.0
    size_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as its processes report it, over all its attempts. handle: of the first attempt.

    spans: by (process, its incarnation, key), newest last. seen: time of the first report.

    queued: its time in queues (ms), and the time up to which that was computed; None before it is needed.
    has_new_spans: some came since then.
    """

    handle: int
    seen: float
    api: RequestNews = _NONE
    conductor: RequestNews = _NONE
    workers: dict[str, RequestNews] = field(default_factory=dict)
    spans: OrderedDict[tuple[str, int, int], Span] = field(default_factory=OrderedDict)
    attempts: list[int] = field(default_factory=list)
    sums: dict[tuple[str, str, str, str], SpanSum] = field(default_factory=dict)
    spans_cut: int = 0
    queued: tuple[float, float] | None = None
    has_new_spans: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the api has reported the request."""
        return self.api.id is not None

    @property
    def has_ended(self) -> bool:
        return self.api.ended is not None

    def tokens(self) -> int:
        """Return the tokens sampled so far; after the end, those in the answer's usage."""
        if self.api.tokens is not None:
            return self.api.tokens
        return sum(news.tokens or 0 for news in self.workers.values())

    def add(self, child: str, incarnation: int, span: Span) -> None:
        """Keep a span. It replaces one with the same key. Open spans are in no sum."""
        self.has_new_spans = True
        self.spans.pop((child, incarnation, span.key), None)
        self.spans[child, incarnation, span.key] = span
        if len(self.spans) > SPANS:
            self.spans.popitem(last=False)
            self.spans_cut += 1
        if span.is_open:
            return
        total = self.sums.setdefault((child, span.node, span.walk, span.kind), SpanSum(start=span.start))
        total.spans += 1
        total.count += span.count
        total.busy_s += span.spent_s
        total.device_s += span.device_s
        total.start, total.end = min(total.start, span.start), max(total.end, span.end)
        total.size_bytes += span.size_bytes

    def drop_spans(self) -> None:
        """Drop all spans. Their sums stay."""
        self.spans_cut += len(self.spans)
        self.spans.clear()

    def parts(self, now: float) -> list[Part]:
        """Return the parts of the time from its arrival to `now`, or to its end."""
        zero, until = self.api.started or 0.0, self._until(now)
        open_spans = [_span(child, span, zero) for (child, _, _), span in self.spans.items() if span.is_open]
        return parts([*self._sums(zero), *open_spans], max(0.0, 1000 * (until - zero)))

    def _until(self, now: float) -> float:
        return now if self.api.ended is None else self.api.ended

    def _queued_ms(self, now: float, age_s: float) -> float:
        """Return its part in queues. It is kept, because lists show thousands of ended requests."""
        until = self._until(now)
        if self.queued is not None:
            kept_ms, at = self.queued
            is_exact = at == until and not self.has_new_spans
            if is_exact or (not self.has_ended and until - at < age_s):
                return kept_ms
        found_ms = round(sum(part.ms for part in self.parts(now) if part.kind == QUEUE), 3)
        self.queued, self.has_new_spans = (found_ms, until), False
        return found_ms

    def _sums(self, zero: float) -> list[dict[str, Any]]:
        return [_sum(where, total, zero) for where, total in sorted(self.sums.items(), key=lambda i: i[1].start)]

    def device_s(self, ranks_of: RanksOf) -> float:
        """Return its share of the time in steps of all ranks that computed for it, followers included."""
        sums = ((child, node, total) for (child, node, _, kind), total in self.sums.items() if kind == COMPUTE)
        return round(sum(total.device_s * ranks_of(rank_of(child), node) for child, node, total in sums), 6)

    def _steps(self) -> RequestNews | None:
        """Return the report with the progress of the step loop.

        None for a request that has finished while the last count of its loop is still on the way from the worker.
        """
        reports = (news for news in self.workers.values() if news.steps)
        latest = max(reports, key=lambda news: news.step or 0, default=None)
        is_behind = latest is not None and (latest.step or 0) < (latest.steps or 0)
        return None if is_behind and self.api.state == "finished" else latest

    def request(
        self,
        model: str,
        now: float,
        age_s: float = 0.0,
        host_of: HostOf = only_here,
        ranks_of: RanksOf = lambda rank, node: 1,
    ) -> RequestStatus:
        """Return the request as clients see it. now: for the parts of its time, which may be `age_s` old if it runs."""
        api, at = self.api, self.conductor
        ended = self.has_ended
        why = api.why or next((news.why for news in self.workers.values() if news.why), "")
        steps = self._steps()
        is_placed = not ended and api.state == "run"
        cached = api.cached_tokens if api.cached_tokens is not None else at.cached_tokens
        return RequestStatus(
            id=api.id or "",
            handle=self.handle,
            parent=api.parent or "",
            route=api.route or "",
            model=model,
            inputs=api.inputs or [],
            outputs=api.outputs or [],
            period_ms=api.period_ms,
            skipped_ticks=api.skipped_ticks,
            state=api.state or "prepare",
            node=at.node if is_placed else None,
            rank=at.rank if is_placed else None,
            host=host_of(at.rank) if is_placed and at.rank is not None else "",
            walk=at.walk if is_placed else None,
            started=api.started or 0.0,
            ended=api.ended,
            ttft_ms=_ms(api.ttft_s),
            ttfa_ms=_ms(api.ttfa_s),
            tokens=self.tokens(),
            prompt_tokens=api.prompt_tokens or 0,
            cached_tokens=cached or 0,
            audio_s=api.audio_s or 0.0,
            audio_in_s=api.audio_in_s or 0.0,
            images=api.images or 0,
            video_s=api.video_s or 0.0,
            device_s=self.device_s(ranks_of),
            waited_ms=self._queued_ms(now, age_s),
            pages=0 if ended else sum(news.pages or 0 for news in self.workers.values()),
            step=0 if steps is None else steps.step or 0,
            steps=0 if steps is None else steps.steps or 0,
            step_rate=0.0 if steps is None else steps.step_rate or 0.0,
            active=[] if ended else at.active or [],
            walks=at.walks or {},
            why="" if ended else why,
            placed=at.placed or "",
            error=api.error or "",
            message=api.message or "",
            attempts=api.attempts or 0,
            pauses_s=api.pauses_s or [],
            causes=api.causes or [],
        )

    def trace(self, request: RequestStatus, now: float, graph: GraphView | None = None) -> dict[str, Any]:
        """Return the request with its spans, their sums and the parts of its time, in ms since its arrival.

        request: as clients see it. now: for its age. graph: see `with_waits`.
        """
        zero = self.api.started or 0.0
        spans = sorted(self.spans.items(), key=lambda item: item[1].start)
        trace = with_waits(
            {"spans": [_span(child, span, zero) for (child, _, _), span in spans], "sums": self._sums(zero)},
            {"ttfa_ms": request.ttfa_ms, "audio_s": request.audio_s},
            graph,
        )
        return {
            "request": request_item(request, now),
            **trace,
            "parts": [
                {"name": part.name, "kind": part.kind, "node": part.node, "ms": round(part.ms, 3)}
                for part in self.parts(now)
            ],
            "spans_cut": self.spans_cut,
        }


class RequestLog:
    """All requests of a deployment. Owned by the state publisher.

    graph: of the deployment, once it is known. shown: ended requests that watchers still see. ttft, ttfa, latency (of
    whole requests): seconds, of the last minute. tokens, audio_s: generated since the start. on_end: called with each
    request that ended, after LINGER_S, when its last spans have arrived. host_of: host of a rank, empty for the
    supervisor's.
    """

    def __init__(self, model: str, host_of: HostOf = only_here) -> None:
        self.live: dict[int, RequestRecord] = {}
        self.ended: OrderedDict[int, RequestRecord] = OrderedDict()
        self.shown: OrderedDict[int, RequestRecord] = OrderedDict()
        self.dirty: set[int] = set()
        self.ttft, self.ttfa, self.latency = Minute(), Minute(), Minute()
        self.tokens = 0
        self.audio_s = 0.0
        self.on_end: list[Callable[[RequestRecord], None]] = []
        self.graph: GraphView | None = None
        self._model = model
        self._host_of = host_of
        self._traced: dict[int, RequestRecord] = {}  # ended requests that have spans, the oldest first
        self._ended_spans = 0
        self._first: dict[int, int] = {}  # first handle of a request, by the handle of a later attempt

    def take(self, child: str, telemetry: Telemetry, now: float) -> None:
        """Add the request reports and spans of one process."""
        for news in telemetry.requests:
            self._report(child, news, now)
        for span in telemetry.spans:
            handle = self._first.get(span.handle, span.handle)
            record = self.live.get(handle) or self.ended.get(handle)
            if record is None:
                record = self.live[handle] = RequestRecord(handle=handle, seen=now)
            if record.has_ended:
                self.dirty.add(handle)  # its time on devices has grown
            before = len(record.spans)
            record.add(child, telemetry.incarnation, span)
            if handle in self.ended:
                self._keep_spans(record, len(record.spans) - before)

    def part(self, child: str) -> None:
        """Drop the state that a dead process reported about live requests; what they generated stays counted.

        The end of the api ends all live requests.
        """
        if child == API:
            self.dirty.update(self.live)
            self.live.clear()
            return
        for handle, record in self.live.items():
            news = record.workers.get(child)
            if child == CONDUCTOR:
                record.conductor = _NONE
            elif news is not None:
                record.workers[child] = RequestNews(handle=handle, tokens=news.tokens, step=news.step, steps=news.steps)
            else:
                continue
            self.dirty.add(handle)

    def settle(self, now: float) -> None:
        """Take requests that ended LINGER_S ago as over, and drop reports of unnamed ones after ORPHAN_S."""
        for handle in [h for h, record in self.live.items() if _is_over(record, now)]:
            record = self.live.pop(handle)
            self.dirty.add(handle)
            for attempt in record.attempts:
                self._first.pop(attempt, None)
            if not record.is_named:
                continue
            self.ended[handle] = self.shown[handle] = record
            self._keep_spans(record, len(record.spans))
            if len(self.ended) > ENDED:
                _, oldest = self.ended.popitem(last=False)
                self._drop_spans(oldest)  # those that failed stay in the view of watchers
            for callback in self.on_end:
                callback(record)
        while len(self.shown) > SHOWN:
            handle = next((h for h, record in self.shown.items() if not record.api.error), next(iter(self.shown)))
            del self.shown[handle]
            self.dirty.add(handle)

    def _keep_spans(self, record: RequestRecord, added: int) -> None:
        """Count spans of an ended request, and drop those of the oldest ones beyond the limit."""
        if record.spans:
            self._traced[record.handle] = record
        self._ended_spans += added
        while self._ended_spans > ENDED_SPANS:
            self._drop_spans(next(iter(self._traced.values())))

    def _drop_spans(self, record: RequestRecord) -> None:
        if self._traced.pop(record.handle, None) is not None:
            self._ended_spans -= len(record.spans)
            record.drop_spans()

    def trace(self, record: RequestRecord, now: float | None = None) -> dict[str, Any]:
        """Return the trace of a request. now: for its age; the end of an ended one by default."""
        at = record.api.ended or record.seen if now is None else now
        return record.trace(self.status(record, at), at, self.graph)

    def status(self, record: RequestRecord, now: float, age_s: float = 0.0) -> RequestStatus:
        """See `RequestRecord.request`."""
        return record.request(self._model, now, age_s, self._host_of, self._ranks_of)

    def _ranks_of(self, rank: int | None, node: str) -> int:
        nodes = () if self.graph is None else self.graph.nodes
        groups = (group for each in nodes if each.name == node for group in each.replicas if rank in group)
        return max(1, len(next(groups, ())))

    def take_dirty(self, now: float) -> Iterator[tuple[int, RequestStatus | None]]:
        """Yield the requests that changed since the last call, with None for those that left the view."""
        dirty, self.dirty = self.dirty, set()
        for handle in dirty:
            record = self.live.get(handle) or self.shown.get(handle)
            if record is None:
                yield handle, None
            elif record.is_named:
                yield handle, self.status(record, now, QUEUED_S)

    def all(self) -> Iterator[RequestRecord]:
        """Yield requests, newest first: live ones, then those that ended."""
        yield from (record for record in reversed(self.live.values()) if record.is_named)
        yield from reversed(self.ended.values())

    def find(self, request_id: str, handle: int | None = None) -> RequestRecord | None:
        """Return the newest request with this client id; with a handle, exactly that one."""
        if handle is not None:
            candidate = self.live.get(handle) or self.ended.get(handle)
            return (
                candidate if candidate is not None and candidate.is_named and candidate.api.id == request_id else None
            )
        return next((record for record in self.all() if record.api.id == request_id), None)

    def name_of(self, handle: int) -> str:
        """Return the client's id of a request, empty if it is unknown."""
        record = self.live.get(handle) or self.ended.get(handle)
        return "" if record is None else record.api.id or ""

    def _report(self, child: str, news: RequestNews, now: float) -> None:
        handle = self._first.get(news.handle, news.handle)
        record = self.live.get(handle)
        if record is None:
            if (over := self.ended.get(handle)) is not None:  # a late report about a request that ended
                if child == CONDUCTOR:
                    over.conductor = news
                return
            record = self.live[handle] = RequestRecord(handle=handle, seen=now)
        if record.attempts and child != API and news.handle != record.attempts[-1]:
            return  # a late report about an earlier attempt
        if news.current is not None and news.current not in self._first:
            self._new_attempt(record, news.current)
        before, audio = record.tokens(), record.api.audio_s or 0.0
        if child == API:
            self._firsts(record.api, news, now)
            record.api = news
        elif child == CONDUCTOR:
            record.conductor = news
        elif rank_of(child) is not None:
            record.workers[child] = news
        self.tokens += max(0, record.tokens() - before)
        self.audio_s += max(0.0, (record.api.audio_s or 0.0) - audio)
        self.dirty.add(handle)

    def _new_attempt(self, record: RequestRecord, handle: int) -> None:
        """Merge later reports about an attempt into the record of its request, and those that overtook this one."""
        self._first[handle] = record.handle
        record.attempts.append(handle)
        early = self.live.pop(handle, None)
        if early is None:
            return
        self.dirty.add(handle)
        record.conductor = early.conductor
        record.workers |= early.workers
        for (child, incarnation, _), span in early.spans.items():
            record.add(child, incarnation, span)

    def _firsts(self, before: RequestNews, news: RequestNews, now: float) -> None:
        if before.ttft_s is None and news.ttft_s is not None:
            self.ttft.add(now, news.ttft_s)
        if before.ttfa_s is None and news.ttfa_s is not None:
            self.ttfa.add(now, news.ttfa_s)
        if news.state == "finished" and before.ended is None and news.ended is not None and news.started is not None:
            self.latency.add(now, news.ended - news.started)


def request_item(request: RequestStatus, now: float) -> dict[str, Any]:
    """Return a request as the admin socket shows it: all fields, its age, real-time factor and missed ticks."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    rtf = request.rtf(now)
    return {
        **fields,
        "age_s": round(request.age_s(now), 3),
        "rtf": None if rtf is None else round(rtf, 3),
        "missed_ticks": request.missed_ticks(now),
    }


def _is_over(record: RequestRecord, now: float) -> bool:
    if record.api.ended is not None:
        return now - record.api.ended > LINGER_S
    return not record.is_named and now - record.seen > ORPHAN_S


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _where(child: str, kind: str, node: str, walk: str) -> dict[str, Any]:
    return {"process": child, "rank": rank_of(child), "kind": kind, "node": node, "walk": walk}


def _span(child: str, span: Span, zero: float) -> dict[str, Any]:
    return {
        **_where(child, span.kind, span.node, span.walk),
        "start_ms": _ms(span.start - zero),
        "end_ms": _ms(span.end - zero),
        "count": span.count,
        "batch": span.batch,
        "size_bytes": span.size_bytes,
        "busy_ms": _ms(span.spent_s),
        "is_open": span.is_open,
    }


def _sum(where: tuple[str, str, str, str], total: SpanSum, zero: float) -> dict[str, Any]:
    child, node, walk, kind = where
    return {
        **_where(child, kind, node, walk),
        "start_ms": _ms(total.start - zero),
        "end_ms": _ms(total.end - zero),
        "busy_ms": _ms(total.busy_s),
        "spans": total.spans,
        "count": total.count,
        "size_bytes": total.size_bytes,
    }
