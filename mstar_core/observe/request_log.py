"""Requests as the supervisor knows them: the news of all processes put together, spans, and the last ones that ended.

Bounded: 2000 ended requests, 200 spans of each and sums of all. Read by the admin socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.messages.life import Telemetry
from mstar_core.messages.names import API, CONDUCTOR, rank_of
from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.observe.frames import RequestStatus
from mstar_core.observe.rates import Minute

ENDED: Final = 2000
SPANS: Final = 200
LINGER_S: Final = 3.0
"""How long an ended request stays in the live view."""

ORPHAN_S: Final = 30.0
"""How long news of a request wait for the api to tell of it."""

ENDS: Final = frozenset({"finished", "failed", "cancelled"})
_NONE: Final = RequestNews(handle=0)


@dataclass(slots=True)
class Sum:
    """All spans of one kind at one place, also those that are not kept. busy_s: time in them."""

    spans: int = 0
    count: int = 0
    busy_s: float = 0.0
    start: float = 0.0
    end: float = 0.0
    size_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. workers: news by process. spans: by (process, key), newest last. seen: when first heard of."""

    handle: int
    seen: float
    api: RequestNews = _NONE
    conductor: RequestNews = _NONE
    workers: dict[str, RequestNews] = field(default_factory=dict)
    spans: OrderedDict[tuple[str, int], Span] = field(default_factory=OrderedDict)
    sums: dict[tuple[str, str, str, str], Sum] = field(default_factory=dict)
    spans_cut: int = 0

    @property
    def is_named(self) -> bool:
        """Whether the api has told of it."""
        return self.api.id is not None

    @property
    def has_ended(self) -> bool:
        return self.api.ended is not None

    def tokens(self) -> int:
        """Ids drawn; at the end, what the answer's usage says."""
        if self.api.tokens is not None:
            return self.api.tokens
        return sum(news.tokens or 0 for news in self.workers.values())

    def add(self, child: str, span: Span) -> None:
        """Keep a span; the same key again replaces it. Open ones are in no sum."""
        self.spans.pop((child, span.key), None)
        self.spans[child, span.key] = span
        if len(self.spans) > SPANS:
            self.spans.popitem(last=False)
            self.spans_cut += 1
        if span.is_open:
            return
        found = self.sums.setdefault((child, span.node, span.walk, span.kind), Sum(start=span.start))
        found.spans += 1
        found.count += span.count
        found.busy_s += span.end - span.start
        found.start, found.end = min(found.start, span.start), max(found.end, span.end)
        found.size_bytes += span.size_bytes

    def request(self, model: str) -> RequestStatus:
        """The request as everybody sees it."""
        api, at = self.api, self.conductor
        ended = self.has_ended
        waited = (api.waited_s or 0.0) + sum(news.waited_s or 0.0 for news in self.workers.values())
        why = api.why or next((news.why for news in self.workers.values() if news.why), "")
        is_placed = not ended and api.state == "run"
        cached = api.cached_tokens if api.cached_tokens is not None else at.cached_tokens
        return RequestStatus(
            id=api.id or "",
            handle=self.handle,
            route=api.route or "",
            model=model,
            inputs=api.inputs or [],
            outputs=api.outputs or [],
            state=api.state or "prepare",
            node=at.node if is_placed else None,
            rank=at.rank if is_placed else None,
            walk=at.walk if is_placed else None,
            started=api.started or 0.0,
            ended=api.ended,
            ttft_ms=_ms(api.ttft_s),
            ttfa_ms=_ms(api.ttfa_s),
            tokens=self.tokens(),
            prompt_tokens=api.prompt_tokens or 0,
            cached_tokens=cached or 0,
            audio_s=api.audio_s or 0.0,
            waited_ms=round(waited * 1000, 3),
            pages=0 if ended else sum(news.pages or 0 for news in self.workers.values()),
            active=[] if ended else at.active or [],
            walks=at.walks or {},
            why="" if ended else why,
            error=api.error or "",
        )

    def trace(self, model: str, now: float | None = None) -> dict[str, Any]:
        """The request with where its time went. Offsets in milliseconds from its arrival. now: for its age."""
        zero = self.api.started or 0.0
        spans = sorted(self.spans.items(), key=lambda item: item[1].start)
        return {
            "request": request_item(self.request(model), self.seen if now is None else now),
            "spans": [_span(child, span, zero) for (child, _), span in spans],
            "sums": [_sum(where, found, zero) for where, found in sorted(self.sums.items(), key=lambda i: i[1].start)],
            "spans_cut": self.spans_cut,
        }


class RequestLog:
    """Owned by the picture. ttft, ttfa: seconds of the last minute. tokens, audio_s: made since the start.

    on_end: called with each request that ended, once a moment has passed in which its last spans came.
    """

    def __init__(self, model: str) -> None:
        self.live: dict[int, RequestRecord] = {}
        self.ended: OrderedDict[int, RequestRecord] = OrderedDict()
        self.dirty: set[int] = set()
        self.ttft, self.ttfa = Minute(), Minute()
        self.tokens = 0
        self.audio_s = 0.0
        self.on_end: list[Callable[[RequestRecord], None]] = []
        self._model = model

    def take(self, child: str, telemetry: Telemetry, now: float) -> None:
        """News and spans of one process."""
        for news in telemetry.requests:
            self._news(child, news, now)
        for span in telemetry.spans:
            known = self.live.get(span.handle) or self.ended.get(span.handle)
            if known is None:
                known = self.live[span.handle] = RequestRecord(handle=span.handle, seen=now)
            known.add(child, span)

    def part(self, child: str) -> None:
        """A process is gone: what it told of live requests counts no more; without the api there are none."""
        if child == API:
            self.dirty.update(self.live)
            self.live.clear()
            return
        for handle, known in self.live.items():
            if child == CONDUCTOR:
                known.conductor = _NONE
            elif known.workers.pop(child, None) is None:
                continue
            self.dirty.add(handle)

    def settle(self, now: float) -> None:
        """Move requests that ended a moment ago out of the live view, and forget news that nobody claimed."""
        for handle in [h for h, known in self.live.items() if _is_over(known, now)]:
            known = self.live.pop(handle)
            self.dirty.add(handle)
            if not known.is_named:
                continue
            self.ended[handle] = known
            if len(self.ended) > ENDED:
                self.ended.popitem(last=False)
            for tell in self.on_end:
                tell(known)

    def take_dirty(self) -> Iterator[tuple[int, RequestStatus | None]]:
        """Requests that changed since the last call, None for those that left the live view."""
        dirty, self.dirty = self.dirty, set()
        for handle in dirty:
            known = self.live.get(handle)
            if known is None:
                yield handle, None
            elif known.is_named:
                yield handle, known.request(self._model)

    def all(self) -> Iterator[RequestRecord]:
        """Requests, newest first: live ones, then those that ended."""
        yield from (known for known in reversed(self.live.values()) if known.is_named)
        yield from reversed(self.ended.values())

    def find(self, request_id: str, handle: int | None = None) -> RequestRecord | None:
        """The newest request that a client named so; with a handle that very one."""
        if handle is not None:
            found = self.live.get(handle) or self.ended.get(handle)
            return found if found is not None and found.is_named and found.api.id == request_id else None
        return next((known for known in self.all() if known.api.id == request_id), None)

    def name_of(self, handle: int) -> str:
        """The client's name for a request; empty when nobody has told it."""
        known = self.live.get(handle) or self.ended.get(handle)
        return "" if known is None else known.api.id or ""

    def _news(self, child: str, news: RequestNews, now: float) -> None:
        known = self.live.get(news.handle)
        if known is None:
            if (over := self.ended.get(news.handle)) is not None:  # it ended a while ago, and this was told late
                if child == CONDUCTOR:
                    over.conductor = news
                return
            known = self.live[news.handle] = RequestRecord(handle=news.handle, seen=now)
        before, audio = known.tokens(), known.api.audio_s or 0.0
        if child == API:
            self._firsts(known.api, news, now)
            known.api = news
        elif child == CONDUCTOR:
            known.conductor = news
        elif rank_of(child) is not None:
            known.workers[child] = news
        self.tokens += max(0, known.tokens() - before)
        self.audio_s += max(0.0, (known.api.audio_s or 0.0) - audio)
        self.dirty.add(news.handle)

    def _firsts(self, before: RequestNews, news: RequestNews, now: float) -> None:
        if before.ttft_s is None and news.ttft_s is not None:
            self.ttft.add(now, news.ttft_s)
        if before.ttfa_s is None and news.ttfa_s is not None:
            self.ttfa.add(now, news.ttfa_s)


def request_item(request: RequestStatus, now: float) -> dict[str, Any]:
    """A request as lists and single reads give it: every field, with its age and real-time factor."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    rtf = request.rtf(now)
    return {**fields, "age_s": round(request.age_s(now), 3), "rtf": None if rtf is None else round(rtf, 3)}


def _is_over(known: RequestRecord, now: float) -> bool:
    if known.api.ended is not None:
        return now - known.api.ended > LINGER_S
    return not known.is_named and now - known.seen > ORPHAN_S


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _span(child: str, span: Span, zero: float) -> dict[str, Any]:
    return {
        "process": child,
        "rank": rank_of(child),
        "kind": span.kind,
        "node": span.node,
        "walk": span.walk,
        "start_ms": _ms(span.start - zero),
        "end_ms": _ms(span.end - zero),
        "count": span.count,
        "batch": span.batch,
        "size_bytes": span.size_bytes,
        "is_open": span.is_open,
    }


def _sum(where: tuple[str, str, str, str], found: Sum, zero: float) -> dict[str, Any]:
    child, node, walk, kind = where
    return {
        "process": child,
        "rank": rank_of(child),
        "kind": kind,
        "node": node,
        "walk": walk,
        "start_ms": _ms(found.start - zero),
        "end_ms": _ms(found.end - zero),
        "busy_ms": _ms(found.busy_s),
        "spans": found.spans,
        "count": found.count,
        "size_bytes": found.size_bytes,
    }
