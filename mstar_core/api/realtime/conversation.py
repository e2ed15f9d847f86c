"""A conversation: input of the user, its items and the responses of the model. Called by a dialect.

It knows no event and no connection. Everything that happens goes to `Reports`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from mstar_core.api.errors import reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.realtime.floor import ConversationStatus, Floor
from mstar_core.api.realtime.history import History, PromptSizes, new_id
from mstar_core.api.realtime.items import Entry, HeardPart, MessageEntry, SpokenPart, size_of, sounds_of
from mstar_core.api.realtime.reading_ahead import ReadingAhead
from mstar_core.api.realtime.reports import Reports
from mstar_core.api.realtime.response import RealtimeResponse, StopReason
from mstar_core.api.realtime.response_run import ResponseRun, RunHooks, turn_of
from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.api.realtime.sound.formats import Pcm, SoundFormat
from mstar_core.api.realtime.sound.input_buffer import InputBuffer
from mstar_core.api.realtime.sound.resampling import PieceResampler
from mstar_core.api.realtime.sound.turn_detection import Edge, TurnDetector
from mstar_core.api.realtime.sound.voice_activity import SpeechProbabilities
from mstar_core.api.realtime.transcripts import Transcriber
from mstar_core.errors import NotFound, Overloaded, RequestError, TooLarge
from mstar_core.plugin.surface import Audio

AHEAD_S: Final = 300.0
"""Sound that may arrive faster than it sounds."""

LEAST_COMMIT_MS: Final = 100
MOST_RESPONSES: Final = 8
"""Responses of a session at once; all but one are apart from the conversation."""

HEARD_S: Final = 0.5
"""Time for which sound that arrives without detection of speech counts as speech."""

HEARD_RATE: Final = 16_000
"""Rate of the buffer for a model that declares none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOrder:
    """A response that is asked for. settings: of this response. entries: in place of the conversation's items."""

    settings: RealtimeSettings
    entries: Sequence[Entry] | None = None
    is_apart: bool = False
    metadata: dict[str, str] | None = None


class RealtimeConversation:
    """Owned by a session. Its methods are called one after the other; responses run beside them."""

    def __init__(
        self,
        exchange: Exchange,
        session_id: str,
        settings: RealtimeSettings,
        history: History,
        reports: Reports,
        probabilities: Callable[[int], SpeechProbabilities],
        has_room: Callable[[], Awaitable[None]],
    ) -> None:
        """exchange: of the first connection. probabilities: of speech, for sound of a rate."""
        self.settings = settings
        self.history = history
        self._exchange = exchange
        self._session_id = session_id
        self._service = exchange.service
        self._reports = reports
        self._make_probabilities = probabilities
        self._has_room = has_room
        audio = self._service.model.input("audio")
        self._rate = audio.rate if isinstance(audio, Audio) else HEARD_RATE
        self._buffer = InputBuffer(self._rate, exchange.limits.max_audio_s)
        self._resampler = PieceResampler(settings.heard.rate, self._rate)
        self._detector: TurnDetector | None = None
        self._probabilities: SpeechProbabilities | None = None
        self._runs: dict[str, ResponseRun] = {}
        self._left_out: set[str] = set()
        self._sizes = PromptSizes()
        self._transcriber = Transcriber(reports, self._next_turn)
        self._ahead = ReadingAhead(exchange, session_id, self._next_turn)
        self._number = 0
        self._next_item = ""
        self._ahead_s = 0.0
        self._heard_at = self._service.clock()
        self._turn_ended_at: float | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._floor = Floor()
        self._follow_rules()

    def status(self) -> ConversationStatus:
        """Return its state as operators see it. Without detection, sound that arrives is speech of the user."""
        now, active, detector = self._service.clock(), self.active, self._detector
        speaks = len(self._buffer) > 0 and now - self._heard_at < HEARD_S if detector is None else detector.is_speaking
        response = None if active is None else active.response
        return ConversationStatus(
            speaks=self._floor.speaker(response, now, is_user_speaking=speaks),
            answers=self._floor.answers,
            interrupts=self._floor.interrupts,
            false_starts=self._floor.false_starts,
            items=len(self.history),
            request=f"{self._exchange.request_id}-{self._number}" if self._number else "",
            first_audio_s=self._floor.first_audio_s,
        )

    # Settings

    def update(self, settings: RealtimeSettings) -> None:
        """Take other settings. Responses that run keep theirs."""
        before, self.settings = self.settings, settings
        if settings.heard.rate != before.heard.rate:
            self._buffer.append(self._resampler.flush())
            self._resampler = PieceResampler(settings.heard.rate, self._rate)
        if settings.turns != before.turns:
            self._follow_rules()
        self._reports.settings_changed()

    def _follow_rules(self) -> None:
        rules = self.settings.turns
        self._stop_idle()
        self._detector = None if rules is None else TurnDetector(rules, self._buffer.end_ms)
        self._probabilities = None if rules is None else self._make_probabilities(self._rate)

    # Sound of the user

    async def hear(self, data: bytes) -> None:
        """Take sound of the user, and find its turns. Raises RequestError, TooLarge, Overloaded."""
        self._check_hears()
        form = self.settings.heard
        samples = form.decode(data, "audio")
        seconds = len(samples) / form.rate
        self._check_pace(seconds)
        self._buffer.check_room(seconds)
        await self._take(self._resampler.push(samples))

    async def commit(self) -> None:
        """Make the buffered sound an item. Raises RequestError."""
        self._check_hears()
        self._buffer.append(self._resampler.flush())
        if len(self._buffer) * 1000 < LEAST_COMMIT_MS * self._rate:
            raise RequestError(
                f"the input audio buffer has less than {LEAST_COMMIT_MS} ms of sound",
                hint="append sound first",
                code="input_audio_buffer_commit_empty",
            )
        self._check_kept(len(self._buffer))
        self._turn_ended_at = self._service.clock()
        self._commit(self._buffer.take())
        self._follow_rules()

    def clear(self) -> None:
        """Drop the buffered sound."""
        self._resampler.flush()
        self._buffer.clear()
        self._ahead.stop()
        self._follow_rules()
        self._next_item = ""
        self._reports.sound_cleared()

    async def _take(self, samples: Pcm) -> None:
        self._buffer.append(samples)
        detector, probabilities = self._detector, self._probabilities
        if detector is None or probabilities is None:
            self._read_ahead(self._buffer.start)
            return
        for probability in await probabilities.push(samples):
            match detector.heard(probability, self._transcriber.draft):
                case Edge.BEGIN:
                    self._speech_began(detector)
                case Edge.END:
                    self._speech_ended(detector)
                case None if detector.is_pausing:
                    self._draft(detector)
                case None:
                    pass
        if detector.is_speaking:
            self._read_ahead(detector.first_ms * self._rate // 1000)
        else:
            spare_ms = detector.rules.prefix_ms + 1000
            self._buffer.forget_before((detector.now_ms - spare_ms) * self._rate // 1000)

    def _read_ahead(self, first: int) -> None:
        """Read the next prompt as far as it is complete. first: place where the sound of the turn begins."""
        start = max(first, self._buffer.start)

        def known(seconds: float | None) -> list[Entry]:
            entries = self._entries()
            if seconds is not None:
                part = HeardPart.of(self._buffer.copy(start, start + int(seconds * self._rate)), self._rate)
                entries.append(MessageEntry(id="", role="user", parts=[part]))
            return entries

        self._ahead.heard((self._buffer.end - start) / self._rate, self.settings, known)

    def _draft(self, detector: TurnDetector) -> None:
        """Transcribe the turn so far, whose words decide how much silence ends it."""
        rules = self.settings.transcripts
        if detector.rules.is_semantic and rules is not None:
            place = detector.first_ms * self._rate // 1000, detector.now_ms * self._rate // 1000
            self._transcriber.begin_draft(HeardPart.of(self._buffer.copy(*place), self._rate), rules)

    def _speech_began(self, detector: TurnDetector) -> None:
        self._stop_idle()
        self._next_item = new_id("item")
        self._reports.speech_started(self._next_item, detector.first_ms)
        active = self.active
        response = None if active is None else active.response
        if self._floor.user_began(response, self._service.clock(), interrupts=detector.rules.interrupts):
            self._service.metrics.realtime_interrupts.inc()
        if detector.rules.interrupts and active is not None:
            self.stop(None, "turn_detected")

    def _speech_ended(self, detector: TurnDetector) -> None:
        self._turn_ended_at = self._service.clock()
        self._transcriber.drop_draft()
        if detector.is_false_start:
            self._service.metrics.realtime_false_starts.inc()
            self._floor.false_starts += 1
        self._reports.speech_stopped(self._next_item, detector.now_ms)
        place = detector.first_ms * self._rate // 1000, detector.now_ms * self._rate // 1000
        sound = self._buffer.take(*place)
        with self._reported():
            self._check_kept(len(sound))
            self._commit(sound)
            if detector.rules.responds:
                self.respond(ResponseOrder(settings=self.settings))

    def _commit(self, samples: Pcm) -> None:
        self._ahead.stop()
        item_id, self._next_item = self._next_item or new_id("item"), ""
        before = self.history.last_id
        part = HeardPart.of(samples, self._rate)
        self._reports.sound_committed(item_id, before)
        self.create(MessageEntry(id=item_id, role="user", parts=[part]))
        if self.settings.transcripts is not None:
            self._transcriber.begin(item_id, 0, part, self.settings.transcripts)

    def _check_hears(self) -> None:
        if self._service.model.input("audio") is None:
            raise RequestError("the model does not accept audio", hint="create items of text", field="audio")

    def _check_pace(self, seconds: float) -> None:
        now = self._service.clock()
        self._ahead_s = max(0.0, self._ahead_s - (now - self._heard_at))
        self._heard_at = now
        if self._ahead_s + seconds > AHEAD_S:
            raise Overloaded(
                f"more than {AHEAD_S:g} s of audio arrived faster than it sounds",
                hint="send it as fast as it sounds",
                code="audio_too_fast",
                field="audio",
            )
        self._ahead_s += seconds

    # Items

    def create(self, entry: Entry, after: str | None = None) -> None:
        """Insert an item. Raises RequestError, TooLarge, NotFound."""
        self._check_size(entry)
        before = self.history.insert(entry, after)
        self._ahead.stop()
        self._reports.item_added(entry, before)
        self._reports.item_done(entry, before)

    def heard_part(self, data: bytes, form: SoundFormat, field: str) -> HeardPart:
        """Return sound of the user that comes as an item. Raises RequestError."""
        self._check_hears()
        stream = PieceResampler(form.rate, self._rate)
        samples = form.decode(data, field)
        part = HeardPart.of(np.concatenate([stream.push(samples), stream.flush()]), self._rate)
        self._check_kept(len(part.samples))
        return part

    def _check_kept(self, samples: int) -> None:
        """Raise TooLarge if the conversation would keep too much sound with so many more samples."""
        longest_s = self._exchange.limits.max_audio_s
        if samples + sum(len(part.samples) for part in sounds_of(self.history)) > longest_s * self._rate:
            raise TooLarge(
                f"the items would have more than {longest_s:g} s of sound",
                hint="delete earlier ones",
                field="audio",
                code="media_too_large",
            )

    def _check_size(self, entry: Entry) -> None:
        """Raise TooLarge if the conversation would keep more text and images than a request may have."""
        most = self._exchange.limits.max_body_bytes
        if size_of(entry) + sum(map(size_of, self.history)) > most:
            raise TooLarge(
                f"the items would have more than {most} bytes of text and images",
                hint="delete earlier ones",
                field="item",
                code="body_too_large",
            )

    def retrieve(self, item_id: str) -> None:
        """Report an item. Raises NotFound."""
        self._reports.item_retrieved(self.history.find(item_id))

    def delete(self, item_id: str) -> None:
        """Remove an item. Raises NotFound, RequestError for one that is being generated."""
        if self.history.find(item_id).status == "in_progress":
            raise RequestError("the item is being generated", hint="cancel its response first", field="item_id")
        self.history.delete(item_id)
        self._ahead.stop()
        self._reports.item_deleted(item_id)

    def truncate(self, item_id: str, part: int, end_ms: int) -> None:
        """Cut speech of the model, and its text, where it was played to. Raises NotFound, RequestError."""
        entry = self.history.find(item_id)
        parts = entry.parts if isinstance(entry, MessageEntry) else []
        speech = parts[part] if 0 <= part < len(parts) else None
        if not isinstance(speech, SpokenPart):
            raise RequestError(
                "only speech of the model can be truncated",
                hint="name a message with output_audio, and the index of that content",
                field="content_index" if parts else "item_id",
            )
        longest = speech.spoken.duration_ms
        if not 0 <= end_ms <= longest:
            raise RequestError(
                f"audio_end_ms is {end_ms}, but the audio has {longest} ms",
                hint="send how much of it was played",
                field="audio_end_ms",
                allowed=f"0 to {longest}",
            )
        if entry.status == "in_progress":
            self.stop(None, "client_cancelled")
        speech.spoken.cut(end_ms)
        self._ahead.stop()
        self._reports.item_truncated(item_id, part, end_ms)

    # Responses

    @property
    def active(self) -> ResponseRun | None:
        """Return the run of the response that joins the conversation, None without one."""
        return next((run for run in self._runs.values() if not run.response.is_apart), None)

    def respond(self, order: ResponseOrder) -> None:
        """Begin a response. Raises RequestError."""
        if not order.is_apart and self.active is not None:
            raise RequestError(
                "the conversation has an active response",
                hint="wait for its end, or cancel it",
                code="conversation_already_has_active_response",
            )
        if len(self._runs) >= MOST_RESPONSES:
            raise RequestError(f"the session has {MOST_RESPONSES} responses", hint="wait for the end of one")
        self._stop_idle()
        self._ahead.stop()
        entries = self._entries()
        response = RealtimeResponse(settings=order.settings, is_apart=order.is_apart, metadata=order.metadata)
        self._reports.response_created(response)
        self._floor.answers += 1
        hooks = RunHooks(
            session_id="" if order.is_apart else self._session_id,
            sizes=PromptSizes() if order.is_apart else self._sizes,
            join=self.history.insert,
            has_room=self._has_room,
            dropped=self._leave_out,
            first_sound=lambda: self._first_sound(response),
            ended=self._ended,
        )
        given = entries if order.entries is None else order.entries
        self._runs[response.id] = ResponseRun(self._next_turn(), response, given, self._reports, hooks)

    def _entries(self) -> list[Entry]:
        """Return the items that prompts hold."""
        return [entry for entry in self.history if entry.id not in self._left_out]

    def stop(self, response_id: str | None, reason: StopReason = "client_cancelled") -> None:
        """Cancel a response, by default the active one. Raises RequestError if there is none."""
        run = self.active if response_id is None else self._runs.get(response_id)
        if run is None:
            raise RequestError(
                "there is no active response" if response_id is None else f"no response {response_id[:80]!r} is active",
                hint="it has ended",
                field=None if response_id is None else "response_id",
                code="response_cancel_not_active",
            )
        run.stop(reason)

    def clear_playback(self) -> None:
        """Stop the active response, and ask the client to drop the sound that it has not played."""
        run = self.active
        if run is not None:
            run.stop("client_cancelled")
            self._reports.playback_cleared(run.response)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report an error of something that no event of the client asked for."""
        try:
            yield
        except RequestError as error:
            self._reports.failed(reply_of(error, self._exchange.request_id), None)

    def _next_turn(self) -> Exchange:
        self._number += 1
        return turn_of(self._exchange, self._number)

    def _leave_out(self, entries: Sequence[Entry]) -> None:
        self._left_out |= {entry.id for entry in entries}
        for part in sounds_of(entries):
            part.drop()

    def _first_sound(self, response: RealtimeResponse) -> None:
        now = self._service.clock()
        if not response.is_apart:
            self._floor.sounded(response, now)
        ended, self._turn_ended_at = self._turn_ended_at, None
        if ended is not None:
            self._floor.first_audio_s = now - ended
            self._service.metrics.realtime_first_audio_s.observe(now - ended)

    def _ended(self, response: RealtimeResponse) -> None:
        self._runs.pop(response.id, None)
        rules = self.settings.turns
        if response.is_apart or rules is None or rules.idle_ms is None or response.state != "completed":
            return
        played_s = response.speech.duration_ms / 1000 if response.speech is not None else 0.0
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(played_s + rules.idle_ms / 1000, self._idle_passed, self._buffer.end_ms)

    # Silence behind an answer

    def _idle_passed(self, start_ms: int) -> None:
        self._idle = None
        if self._detector is None or self._detector.is_speaking or self.active is not None:
            return
        self._next_item = new_id("item")
        self._reports.idle_ended(self._next_item, start_ms, self._buffer.end_ms)
        if len(self._buffer) * 1000 >= LEAST_COMMIT_MS * self._rate:
            self._commit(self._buffer.take(start_ms * self._rate // 1000))
            self._follow_rules()
        with self._reported():
            self.respond(ResponseOrder(settings=self.settings))

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def close(self) -> None:
        """Cancel everything that runs, wait for its end, and free the sound and the items.

        Cycles of references hold the rest up to the next full collection.
        """
        self._stop_idle()
        runs = list(self._runs.values())
        for run in runs:
            run.stop("client_cancelled")
        await asyncio.gather(self._ahead.close(), self._transcriber.close(), *(run.wait() for run in runs))
        self._buffer.clear()
        self.history.clear()
        with suppress(NotFound):  # it had no response, or was idle for long
            self._service.client_sessions.delete(self._exchange.key, self._session_id)
