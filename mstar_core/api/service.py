"""Life cycle of a request: admission, preprocessing, submission to the conductor, outputs. Used by the routes."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from mstar_core.api.admission import AdmissionQueue, BodyMemory, Place
from mstar_core.api.api_metrics import Metrics
from mstar_core.api.errors import ErrorReply, Stalled, lost, reply_of
from mstar_core.api.handover.delivery import Delivery, UnitGate
from mstar_core.api.http.client_secrets import ClientSecrets
from mstar_core.api.http.sanic_protocol import WriteBatch
from mstar_core.api.link import SLEEPING, Link
from mstar_core.api.output.encode import EncodedChunk, NumberForm, OutputEncoder, StopStrings
from mstar_core.api.output.kept_events import KeptEvents
from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.output.spool import Spool
from mstar_core.api.output.token_scores import TokenScores
from mstar_core.api.output.units import OutputItem
from mstar_core.api.output.usage import SampledPorts, usage_of
from mstar_core.api.parse.media import Fetcher
from mstar_core.api.parse.params import LiveText, ParsedRequest
from mstar_core.api.preprocess.grammar_checks import GrammarChecks
from mstar_core.api.preprocess.pool import InputSource, Pool, Read
from mstar_core.api.requests.background import BackgroundRuns
from mstar_core.api.requests.open_sessions import OpenSessions
from mstar_core.api.requests.record import SavedLoops
from mstar_core.api.requests.registry import LiveRequest, Registry, timed_out
from mstar_core.api.requests.response_store import ResponseStore, StoreLimits
from mstar_core.api.requests.session_news import session_news
from mstar_core.api.requests.sessions import AnswerRecord, ClientSession, SessionLimits, Sessions
from mstar_core.api.requests.voice_store import VoiceStore
from mstar_core.api.telemetry import RequestTelemetry
from mstar_core.api.videos.jobs import VideoJobs
from mstar_core.api.videos.store import VideoLimits, VideoStore
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.resolved import ApiConfig
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.errors import ArenaFull, Cancelled, EngineError, MstarError, NotFound, TimedOut
from mstar_core.messages.flow import Saved
from mstar_core.messages.requests import GrowingInput, NewRequest, RequestFinished, SegmentRef
from mstar_core.messages.tensors import TensorRef
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.processor import ContinuingDetokenizer, Detokenizer, Inputs, PromptRequest
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import LOGPROBS, PARTIAL_IMAGE, PROGRESS, Text
from mstar_core.process.system import give_back_freed_memory

KEEPALIVE_S: Final = 15.0
STORED_RESPONSES: Final = "responses.sqlite"
"""Name of the store in the run directory."""

STORED_VOICES: Final = "voices"
"""Name of the folder of uploaded voices in the run directory."""

STORED_VIDEOS: Final = "videos"
"""Name of the folder of videos in the run directory."""

SALT_BYTES: Final = 16
PASSING: Final = ("worker_lost", "starting")
"""Codes of problems that end with the restart of a process."""

NO_RESUME: Final = "the deployment does not resume requests"
BODIES: Final = 8
"""The memory budget for bodies, in bodies of the maximum size."""

log = logging.getLogger("mstar.api")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """End of a successful request. times_ms: queue, ttft, total."""

    finish_reason: str
    usage: dict[str, Any]
    warnings: tuple[str, ...]
    times_ms: dict[str, float]


class Session:
    """A running request, as seen by its handler: read `chunks` to the end, then call `done`."""

    def __init__(
        self,
        service: Service,
        call: ParsedRequest,
        live: LiveRequest,
        queue: OutputQueue,
        encoder: OutputEncoder,
        inputs: Inputs,
        delivery: Delivery | None = None,
        item: int | None = None,
        record: Callable[[], None] | None = None,
    ) -> None:
        """delivery: of the response. item: number of the request among several of one response, whose writer reports
        what was written; None for a request whose reader writes. record: called once its text is whole.
        """
        self.call = call
        self.live = live
        self.encoder = encoder
        self.warnings = (*call.warnings, *inputs.warnings, *lowered(call, inputs))
        self._service = service
        self._queue = queue
        self._inputs = inputs
        self._queued_s = service.clock() - live.started
        self._ending: RequestFinished | None = None
        self._delivery = delivery
        self._item = item
        self._record = record
        self._gate = UnitGate() if delivery is None else delivery.gate(item or 0)

    @property
    def units(self) -> dict[str, int]:
        """Return the units of outputs so far, by port."""
        return dict(self._gate.counts)

    async def chunks(self, keepalive_s: float | None = None) -> AsyncIterator[list[EncodedChunk]]:
        """Yield chunks as they become ready, and an empty list after each `keepalive_s` without output.

        Raises TimedOut, Cancelled, WorkerLost or another error that ended the request, after all earlier chunks.
        """
        pace = self._service.keepalive_s if keepalive_s is None else keepalive_s
        delivery = self._delivery if self._item is None else None
        async for chunks in self._chunks(pace):
            if delivery is not None:
                delivery.note_firsts(self.encoder.first_at, self.encoder.first_sound_at)
                delivery.sends(0, self._gate.counts)
            yield chunks
            if delivery is not None:
                delivery.sent()

    async def _chunks(self, pace: float) -> AsyncIterator[list[EncodedChunk]]:
        while self._ending is None:
            left = self.live.deadline - self._service.clock()
            if left <= 0:
                raise timed_out(self.live)
            items = await self._take(min(pace, left))
            chunks = await self.encoder.chunks(items) if items else []
            self._note_first(next((item.modality for item in items if item.modality not in (PROGRESS, LOGPROBS)), ""))
            self._ending = self._queue.ending if self._gate.is_empty else None
            if self.encoder.is_stopped and self._ending is None:  # the end of the block cancels the request
                self._ending = RequestFinished(handle=self.live.handle, reason="stop")
            if self._ending is not None:
                chunks += self.encoder.flush()
            is_silent = not items and self._ending is None
            if chunks or (is_silent and self._service.clock() < self.live.deadline):
                yield chunks

    async def _take(self, timeout_s: float) -> list[OutputItem]:
        """Return ready outputs. A replay returns them in the parts in which the client has got them.

        Raises EngineError if a replay ends before the outputs that the client has.
        """
        gate, taken = self._gate, list[OutputItem]()
        while not gate.is_open:
            if not gate.is_reached:
                if self._queue.ending is not None:
                    raise EngineError("the request did not repeat its outputs after the api was restarted")
                if self._service.clock() >= self.live.deadline:
                    raise timed_out(self.live)
                taken += gate.take(await self._queue.take(timeout_s))
                continue
            if taken:
                return taken
            assert self._delivery is not None
            await self._delivery.caught_up()
            gate.open()
            taken += gate.take(())
        return taken or gate.take(await self._queue.take(timeout_s))

    def done(self) -> Completion:
        """Return the completion of the request and count its tokens. Call it once, after all chunks were read."""
        assert self._ending is not None
        if self._record is not None and not self.encoder.is_stopped:
            self._record()
        prompt = self._inputs.prompt_tokens
        media: Counter[str] = Counter()
        for segment in self._inputs.segments:
            media.update(segment.counts or {segment.kind: segment.length})
        usage = usage_of(
            self._service.model,
            self._service.sampled,
            self.encoder,
            prompt_tokens=prompt,
            cached_tokens=self._ending.cached_tokens,
            counts=self._ending.counts,
            media=media,
        )
        usage |= self._inputs.usage
        warnings = self.warnings
        if "audio" in self.call.outputs and not self.encoder.samples:
            warnings = (*warnings, "the output is too short to contain audio; the audio is empty")
        now = self._service.clock()
        first = self.encoder.first_at or now
        times = {"queue_ms": self._queued_s, "ttft_ms": first - self.live.started, "total_ms": now - self.live.started}
        done = Completion(
            finish_reason="stop" if self.encoder.is_stopped else self._ending.reason,
            usage=usage,
            warnings=warnings,
            times_ms={name: value * 1000 for name, value in times.items()},
        )
        self.live.result = {"finish_reason": done.finish_reason, "usage": usage, "seed": self.call.seed}
        asyncio.get_running_loop().call_soon(self._service.metrics.count_tokens, usage)  # sends the response first
        return done

    def _note_first(self, modality: str) -> None:
        if modality and "first" not in self.live.result:
            self.live.result["first"] = modality
            at = self.encoder.first_at
            if at is not None:
                self._service.metrics.ttft_s.labels(modality).observe(at - self.live.started)


class Service:
    """State shared by the routes. Owned by the api process."""

    def __init__(
        self,
        deployment: DeploymentSpec,
        model: ModelSpec,
        link: Link,
        pool: Pool,
        registry: Registry,
        metrics: Metrics,
        *,
        fetcher: Fetcher,
        detokenizer: Callable[[], Detokenizer] | None = None,
        token_table: Callable[[], TokenTable] | None = None,
        grammars: GrammarChecks | None = None,
        keepalive_s: float = KEEPALIVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deployment = deployment
        self.model = model
        self.link = link
        self.pool = pool
        self.registry = registry
        self.metrics = metrics
        self.keepalive_s = keepalive_s
        self.clock = clock
        self.created = int(time.time())
        self.description: dict[str, Any] = {}  # set by the app, which knows the routes
        self.live_views = 0  # open views of the web page
        self._recorded: WeakSet[MstarError] = WeakSet()  # errors that ended a registered request
        self.samples: dict[str, Any] | None = None  # made by the first request for them
        self.uploads = deployment.uploads
        self.sampled = SampledPorts.by(model)
        text = model.input("text")
        self.grows = text.grows if isinstance(text, Text) else ""  # input for ids of a text that arrives
        self.emits_progress = model.emits(PROGRESS)
        self.emits_partial_images = model.emits(PARTIAL_IMAGE)
        api = deployment.api
        self.admission = AdmissionQueue(
            deployment.max_concurrent_requests, deployment.max_queue, clock, per_key=api.max_requests_per_key
        )
        self.held = BodyMemory(BODIES * api.max_body_bytes, self.admission.retry_after_s)
        self.fetcher = fetcher
        self.limits = media_limits(api)
        self._detokenizer = detokenizer
        self._token_table = token_table
        self.grammars = grammars or GrammarChecks()
        self.kept_events = KeptEvents()
        self.detachable: set[asyncio.Task[Any]] = set()  # handlers of requests that may outlive their connection
        self.background = BackgroundRuns()
        self.responses = ResponseStore(
            Path(deployment.run_dir) / STORED_RESPONSES,
            StoreLimits(ttl_s=api.responses_ttl_s, most=api.responses_max_count, most_bytes=api.responses_max_bytes),
        )
        self.videos = VideoJobs(
            self,
            VideoStore(
                Path(deployment.run_dir) / STORED_VIDEOS,
                VideoLimits(ttl_s=api.videos_ttl_s, most_bytes=api.videos_max_bytes),
            ),
        )
        self.voices = VoiceStore(Path(deployment.run_dir) / STORED_VOICES)
        self.client_secrets = ClientSecrets()
        self.sessions = OpenSessions(api.realtime_max_sessions, on_freed=give_back_freed_memory)
        self.client_sessions = Sessions(
            SessionLimits(
                idle_s=api.sessions_idle_s,
                ttl_s=api.sessions_ttl_s,
                most=api.sessions_max_count,
                media_bytes=api.sessions_media_bytes,
            ),
            clock,
            link.end_session,
        )
        self.burst = WriteBatch()
        self.telemetry = RequestTelemetry(clock, self._why_waiting)
        self.telemetry.on_end = metrics.ended
        link.gauges, link.news = self._gauges, self.telemetry.take
        link.sessions = lambda: session_news(self.sessions, self.client_sessions)
        link.attempts.on_resumed = self.telemetry.resumed
        link.running = lambda: self.admission.running
        link.on_state = lambda state: self.admission.pause(is_paused=bool(state.pause))
        metrics.inflight.set_function(lambda: self.admission.running)
        metrics.queue_depth.set_function(lambda: self.admission.waiting)
        metrics.pool_busy.set_function(lambda: self.pool.busy)
        metrics.realtime_sessions.set_function(lambda: len(self.sessions))
        metrics.sessions.set_function(lambda: len(self.client_sessions))
        metrics.session_media_bytes.set_function(lambda: self.client_sessions.media.size_bytes)
        self.client_sessions.media.on_read = lambda how, count: metrics.session_images.labels(how).inc(count)

    def reconfigure(self, deployment: DeploymentSpec) -> None:
        """Take a deployment with other keys or limits. Requests in flight and in the queue stay."""
        self.deployment = deployment
        api = deployment.api
        self.admission.limit(deployment.max_concurrent_requests, deployment.max_queue, api.max_requests_per_key)

    async def close(self) -> None:
        """End sessions and runs in the background, whose requests have failed, and close the store of responses."""
        await self.sessions.close()
        await self.videos.close()
        await self.background.close()
        await self.grammars.close()
        await self.responses.close()

    def _why_waiting(self) -> str:
        if self.link.deployment.state == SLEEPING:
            return "the deployment wakes"
        if self.admission.is_paused:
            return "a process of the deployment is being restarted"
        return f"all {self.admission.max_concurrent_requests} slots are in use"

    def _gauges(self) -> dict[str, float]:
        return {
            "requests_running": self.admission.running,
            "requests_waiting": self.admission.waiting,
            "slots": self.admission.max_concurrent_requests,
            "queue": self.admission.max_queue,
            **{what: self.telemetry.counts[what] for what in ("finished", "failed", "cancelled", "refused")},
            "pool_busy": self.pool.busy,
            "bodies_bytes": self.held.size_bytes,
            "sessions": len(self.client_sessions),
            "tensors_lent": self.link.loans,
            "sent_bytes": self.link.sent_bytes,
        }

    def check_open(self, key: str = "", count: int = 1, *, is_continued: bool = False) -> None:
        """Raise Unavailable, WorkerLost or Overloaded if `count` new requests would be refused.

        is_continued: an earlier api has admitted them, so they wait for processes that restart.
        """
        problem = self.link.deployment.problem()
        if problem is not None and not (is_continued and problem.code in ("draining", *PASSING)):
            raise problem
        self.admission.check(key, count)

    def count_refusal(self, reply: ErrorReply, error: Exception) -> None:
        """Count a response if it refuses a request. A request that was registered counts by its outcome instead."""
        if reply.status in (409, 413, 429, 503) and error not in self._recorded:
            self.metrics.rejected.labels(reply.code).inc()
            self.telemetry.counts["refused"] += 1
            self.link.note_news()

    @asynccontextmanager
    async def open(
        self,
        call: ParsedRequest,
        *,
        key: str,
        started: float,
        scope: str = "",
        shared: InputSource | None = None,
        delivery: Delivery | None = None,
        item: int | None = None,
        adapter: int = 0,
        place: Place | None = None,
        goes_on: bool = False,
        is_continued: bool = False,
        saved_before: SavedLoops | None = None,
        on_saved: Callable[[Saved], None] | None = None,
    ) -> AsyncIterator[Session]:
        """Run a request for the duration of the block, and free everything it holds at the end.

        scope: of the cache, beside the key. shared: inputs shared by the items of one request. delivery, item: see
        `Session`. adapter: number of its LoRA adapter, 0 without one. place: of a caller that runs several requests one
        after the other; None takes one for this request. goes_on: its text follows that of another item. is_continued:
        an earlier api has accepted it. saved_before: states of its loops that it has kept. on_saved: called with states
        that its loops save.

        Raises Duplicate, Overloaded, Unavailable, TimedOut, Cancelled, and errors of preprocessing.
        """
        is_continued = is_continued or (delivery is not None and delivery.is_continued)
        self.check_open(key, 1 if place is None else 0, is_continued=is_continued)
        if adapter and all(each.number != adapter for each in self.deployment.adapters):
            raise NotFound("the model was unloaded", hint="GET /v1/models lists the models", code="model_not_found")
        self.link.spin.rouse()
        deadline = started + call.timeout_s
        with (
            self.registry.open(
                call.request_id,
                route=call.route,
                key=key,
                started=started,
                deadline=deadline,
                group=call.group,
                adapter=adapter,
                scope=scope,
            ) as live,
            self._noted(live, call),
            self.admission.place(key) if place is None else used(place) as place,
            self._open_queue(live) as output_queue,
            self.client_sessions.request(key, call.session) as talk,
        ):
            if talk is not None:
                call = dataclasses.replace(call, turns=talk.with_known_ids(call.turns, call.texts))
            live.saved_before, live.on_saved = saved_before, on_saved
            if delivery is not None:
                self._go_on(live, call, delivery, item or 0)
            refs: list[TensorRef] = []
            try:
                inputs = await self._prepared(call, place, live, shared, talk)
                if call.live is not None and inputs.needs_ids:
                    text = await live.until(call.live.with_ids(inputs.needs_ids), self.clock)
                    call = dataclasses.replace(call, live=text)
                    inputs = await live.until(self.pool.prompt(self.prompt_of(call)), self.clock)
                self.metrics.queue_s.observe(self.clock() - live.started)
                await self._begin(call, live, inputs, refs, talk)
                detokenizer = self._detokenizer() if self._detokenizer is not None and "text" in call.outputs else None
                if goes_on and isinstance(detokenizer, ContinuingDetokenizer):
                    detokenizer.go_on()
                record = None
                if talk is not None and detokenizer is not None and not call.reads_only:
                    detokenizer = answer = AnswerRecord(detokenizer)
                    record = partial(talk.remember, answer)
                stops = StopStrings(call.stops) if call.stops else None
                encoder = OutputEncoder(
                    self.model,
                    self.pool.postprocess,
                    detokenizer,
                    self.metrics,
                    self.clock,
                    stops=stops,
                    numbers=NumberForm.of(call.params),
                    facts=inputs.metadata,
                    scores=await self._token_scores(call),
                )
                if delivery is not None and item is None:
                    encoder.first_at, encoder.first_sound_at = delivery.firsts
                live.encoder, live.prompt_tokens, live.due = encoder, inputs.prompt_tokens, 0.0
                live.heard_s = inputs.heard_s
                async with self._growing(call, live):
                    yield Session(self, call, live, output_queue, encoder, inputs, delivery, item, record)
            finally:
                self.link.release([*refs, *live.lent])

    @asynccontextmanager
    async def _growing(self, call: ParsedRequest, live: LiveRequest) -> AsyncIterator[None]:
        """Pass on the text of a request that arrives during the block. Its errors fail the request."""
        if call.live is None:
            yield
            return
        task = asyncio.create_task(self._grow(call.live, live), name=f"text of {live.request_id}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _grow(self, text: LiveText, live: LiveRequest) -> None:
        try:
            async for ids in text.more:
                self.link.attempts.grow(live, self.grows, ids)
            self.link.attempts.grow(live, self.grows, (), is_over=True)
        except MstarError as error:
            live.fail(error)
        except Exception as error:  # isolation boundary: one text, one request
            log.exception("a text that arrives could not be read")
            live.fail(EngineError("the text could not be read", str(error)))

    async def _token_scores(self, call: ParsedRequest) -> TokenScores | None:
        """Return the collector of a request's log-probabilities, None if it reports none."""
        if getattr(call.params, LOGPROBS, None) is None:
            return None
        if self._token_table is None:
            raise EngineError("the model has no token table", "log-probabilities name the tokens of the answer")
        return TokenScores(await asyncio.to_thread(self._token_table))

    def _go_on(self, live: LiveRequest, call: ParsedRequest, delivery: Delivery, item: int) -> None:
        """Continue the journal of an earlier api. Raises WorkerLost if its outputs cannot be repeated."""
        if delivery.is_begun and (reason := self._unresumable(call)):
            raise lost("the api died", f"the request cannot be resumed: {reason}")
        live.on_drawn, live.drawn_before = partial(delivery.drawn, item), delivery.journal(item)

    async def _prepared(
        self,
        call: ParsedRequest,
        place: Place,
        live: LiveRequest,
        shared: InputSource | None,
        session: ClientSession | None,
    ) -> Inputs:
        prompt = self.prompt_of(call)
        read: Read = self.pool.prompt
        if session is not None:
            read = partial(self.client_sessions.media.read, session.name, read=self.pool.prompt)
        # A task that has nothing to wait for would still take two iterations of the event loop.
        inputs = self.pool.run_inline(prompt) if shared is None and self.admission.is_free else None
        if inputs is None:
            prepared = read(prompt) if shared is None else shared.of(prompt, read)
            return await live.until(self._admitted(prepared, place, live), self.clock)
        self._queue(live)
        place.enter()
        self._run(live)
        return inputs

    def prompt_of(self, call: ParsedRequest) -> PromptRequest:
        """Return the input of the processor for a request."""
        return PromptRequest(
            text=call.text,
            texts=call.texts,
            turns=call.turns,
            tools=call.chat.tools,
            tool_choice=call.chat.choice,
            template=call.chat.template,
            is_raw=call.raw is not None,
            ids=call.raw.ids if call.raw is not None else () if call.live is None else call.live.first,
            is_open=call.live is not None,
            media=call.media,
            order=call.order,
            observation=call.observation,
            params=call.params,
            outputs=frozenset(call.outputs),
            seed=call.seed,
            max_seq_len=self.deployment.max_seq_len,
            limits=self.limits,
            reads_windows=call.reads_windows,
        )

    async def _admitted(self, prepared: Awaitable[Inputs], place: Place, live: LiveRequest) -> Inputs:
        inputs = await prepared
        self._queue(live)
        await place.run()
        self._run(live)
        return inputs

    def _queue(self, live: LiveRequest) -> None:
        live.state = "queued"
        self.telemetry.prepared(live)
        self.link.want_wake()

    def _run(self, live: LiveRequest) -> None:
        live.state = "running"
        self.telemetry.admitted(live)

    async def _begin(
        self,
        call: ParsedRequest,
        live: LiveRequest,
        inputs: Inputs,
        refs: list[TensorRef],
        session: ClientSession | None,
    ) -> None:
        """Submit a request once there is room for its inputs, which other requests free when they end."""
        arrays = [*inputs.arrays.values(), *(array for segment in inputs.segments for array in segment.arrays.values())]
        while True:
            if not self.link.has_room(arrays):
                await live.until(self.link.wait_for_room(arrays), self.clock)
            try:
                self._submit(call, live, inputs, refs, session)
            except ArenaFull:  # others took the room in between
                self.link.release(refs)
                refs.clear()
            else:
                return

    def _submit(
        self,
        call: ParsedRequest,
        live: LiveRequest,
        inputs: Inputs,
        refs: list[TensorRef],
        session: ClientSession | None,
    ) -> None:
        def lend(arrays: Any) -> dict[str, TensorRef]:
            lent = {}
            for name, array in arrays.items():
                lent[name] = self.link.put(array)
                refs.append(lent[name])
            return lent

        unresumable = self._unresumable(call)
        problem = self.link.deployment.problem()
        # Admitted before a drain began, and before a process died if the request can wait for its restart.
        if problem is not None and problem.code not in (("draining",) if unresumable else ("draining", *PASSING)):
            raise problem
        segments = [
            SegmentRef(kind=s.kind, length=s.length, inputs=lend(s.arrays), content=s.content) for s in inputs.segments
        ]
        request = NewRequest(
            facts=dict(inputs.facts),
            handle=live.handle,
            request_id=live.request_id,
            params=inputs.plain_params(call.params),
            outputs=list(call.outputs),
            inputs=lend(inputs.arrays),
            segments=segments,
            seed=call.seed,
            deadline_s=max(0.001, live.deadline - self.clock()),
            prompt_tokens=inputs.prompt_tokens,
            salt=self._salt(live.key, live.scope, live.adapter),
            is_journaled=not unresumable,
            adapter=live.adapter,
            session="" if session is None else session.name,
            lease_s=0.0 if session is None else session.lease_s,
            reads_only=call.reads_only,
            growing={} if call.live is None else {self.grows: GrowingInput()},
            is_heard=call.is_heard,
        )
        self.link.attempts.begin(live, request, unresumable)

    def _unresumable(self, call: ParsedRequest) -> str:
        """Return why a request cannot be resumed after the death of a process, empty if it can."""
        return self.model.unresumable_reason(call.params) if self.deployment.resume else NO_RESUME

    def _salt(self, key: str, scope: str, adapter: int) -> bytes:
        """Return the cache salt of an API key, given by its digest, a scope and a LoRA adapter; empty without them.

        The number of an adapter is never used again, so no cached prefix outlives it.
        """
        shares = self.deployment.kv_cache.share_between_keys
        words = [] if shares or not (key or scope) else [key, scope] if scope else [key]
        if adapter:
            words.append(f"adapter {adapter}")
        return hashlib.blake2b(" ".join(words).encode(), digest_size=SALT_BYTES).digest() if words else b""

    @contextmanager
    def _open_queue(self, live: LiveRequest) -> Iterator[OutputQueue]:
        output_queue = OutputQueue(Spool(self.uploads))
        self.link.output_queues[live.handle] = output_queue
        live.on_fail = output_queue.fail
        output_queue.on_lost = lambda death: self.link.attempts.lost_with(live, death)
        try:
            yield output_queue
        finally:
            del self.link.output_queues[live.handle]
            output_queue.close()

    @contextmanager
    def _noted(self, live: LiveRequest, call: ParsedRequest) -> Iterator[None]:
        # Every request ends here: its outcome is recorded, and the conductor cancels it if it still runs.
        error: BaseException | None = None
        self.telemetry.opened(live, call)
        self.link.note_news()
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            why = cancel_cause(error)
            if isinstance(error, MstarError):
                self._recorded.add(error)
            if live.is_sent and not live.is_over:
                self.link.cancel(live.handle, why)
            if error is not None and isinstance(error, (Cancelled, TimedOut, asyncio.CancelledError, GeneratorExit)):
                self.metrics.cancelled.labels(why).inc()
            status, shown = self._outcome(live, error)
            self.registry.remember(live, status, self.clock() - live.started, error=shown, result=live.result)
            told = shown or {}
            self.telemetry.ended(live, status, str(told.get("code") or ""), str(told.get("message") or ""))
            asyncio.get_running_loop().call_soon(self.link.note_change)

    def _outcome(self, live: LiveRequest, error: BaseException | None) -> tuple[str, dict[str, Any] | None]:
        """Return the status of a request that has ended, and its error as clients see it."""
        is_gone = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        status = "finished" if error is None else "cancelled" if is_gone or isinstance(error, Cancelled) else "failed"
        if error is None:
            return status, None
        cause = Cancelled("the client closed the connection") if is_gone else error
        return status, reply_of(cause, live.request_id).body["error"]


@contextmanager
def used(place: Place) -> Iterator[Place]:
    """Use a place for one request, and release its slot at the end of the block."""
    try:
        yield place
    finally:
        place.leave()


def cancel_cause(error: BaseException | None) -> str:
    """Return the `why` of CancelRequest for the error that ended a running request."""
    match error:
        case None:
            return "stop"
        case Stalled():
            return "stalled"
        case Cancelled():
            return "by_id"
        case TimedOut():
            return "deadline"
        case MstarError() if error.code == "draining":
            return "drain"
        case _:
            return "disconnect"


def lowered(call: ParsedRequest, inputs: Inputs) -> tuple[str, ...]:
    """Return a warning if the processor lowered the output limit without a warning of its own."""
    limit, lowered_limit = getattr(call.params, "max_output_tokens", None), inputs.max_output_tokens
    if limit is None or lowered_limit is None or any("max_output_tokens" in text for text in inputs.warnings):
        return ()
    return tuple(lowered_warnings(call.params, "max_output_tokens", lowered_limit))


def media_limits(api: ApiConfig) -> MediaLimits:
    """Return the media limits of a deployment."""
    return MediaLimits(**{limit.name: getattr(api, f"max_{limit.name}") for limit in dataclasses.fields(MediaLimits)})
