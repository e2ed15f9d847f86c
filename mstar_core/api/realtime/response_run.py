"""Run of a response: an ordinary request, whose outputs become those of the response. One task for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from mstar_core.api.errors import reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.group import GroupPart
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.realtime.calls import answer_call, converses, pending_text
from mstar_core.api.realtime.history import PromptSizes, shortened
from mstar_core.api.realtime.items import Entry
from mstar_core.api.realtime.reports import Reports
from mstar_core.api.realtime.response import RealtimeResponse, ResponseState, StopReason
from mstar_core.api.realtime.response_writer import ResponseWriter
from mstar_core.api.realtime.sound.formats import Pcm
from mstar_core.api.realtime.sound.resampling import PieceResampler
from mstar_core.api.service import Completion, Session
from mstar_core.api.text.answers import AnswerPiece, AnswerReader, answer_readers
from mstar_core.errors import MstarError, RequestError
from mstar_core.plugin.chat.parts import CallArguments, CallBegin, Content
from mstar_core.plugin.surface import Audio

CONTEXT_FULL: Final = "context_length_exceeded"

log = logging.getLogger("mstar.api.realtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """Session of a run, and the effects on it. session_id: empty for a response apart. join: adds an item.

    sizes: of the conversation's items. has_room: waits while the client does not read. dropped: items that the context
    does not hold. first_sound: called with the first sound. ended: called once, behind the last report.
    """

    session_id: str
    sizes: PromptSizes
    join: Callable[[Entry], object]
    has_room: Callable[[], Awaitable[None]]
    dropped: Callable[[Sequence[Entry]], None]
    first_sound: Callable[[], None]
    ended: Callable[[RealtimeResponse], None]


class ResponseRun:
    """Generates one response. turn: the session's exchange with an id and a start of its own."""

    def __init__(
        self, turn: Exchange, response: RealtimeResponse, entries: Sequence[Entry], reports: Reports, hooks: RunHooks
    ) -> None:
        self.response = response
        self._turn = turn
        self._entries = entries
        self._hooks = hooks
        audio = turn.service.model.output("audio")
        rate = audio.rate if isinstance(audio, Audio) else response.settings.spoken.rate
        self._writer = ResponseWriter(response, reports, rate, hooks.join)
        self._sound = _SoundGate(self._writer, response, rate, has_tools=bool(response.settings.tools))
        self._session: Session | None = None
        self._late: list[CallBegin | CallArguments] = []
        self._task = asyncio.create_task(self._run(), name=f"response {response.id}")

    def stop(self, reason: StopReason) -> None:
        """End the response now, and cancel its request. Text and sound so far stay."""
        if self.response.is_over:
            return
        self._task.cancel()
        self._note("cancelled", 499)
        self._note_size()
        self._writer.end("cancelled", reason=reason, usage=self._usage_so_far())
        self._hooks.ended(self.response)

    async def wait(self) -> None:
        """Wait until the request holds nothing any more."""
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            while not await self._attempt():
                pass
        except asyncio.CancelledError:
            if not self.response.is_over:
                raise
            # `stop` has ended it. The traceback of an error would hold the request in a cycle with its task.
        except Exception as error:  # noqa: BLE001  isolation boundary: one response
            self._fail(error)

    async def _attempt(self) -> bool:
        """Run the request once. Returns False if the context is too short for all items and fewer are tried next."""
        turn, rules, sizes = self._turn, self.response.settings.truncation, self._hooks.sizes
        if rules.most is not None and sizes.exceed(self._entries, rules.most):
            self._shorten()
        try:
            call = await answer_call(turn, self.response.settings, self._entries, self._hooks.session_id)
            (reader,) = answer_readers(turn, call, 1)
            async with turn.service.open(
                call, key=turn.key, scope=turn.scope, started=turn.started, adapter=turn.adapter
            ) as session:
                self._session = session
                sizes.note(self._entries, session.live.prompt_tokens)
                self._say_first()
                async for chunks in session.chunks():
                    self._take(reader, GroupPart(index=0, chunks=chunks))
                    await self._hooks.has_room()
                done = session.done()
        except RequestError as error:
            if error.code != CONTEXT_FULL or self.response.outputs or not self._shorten():
                raise
            return False
        self._take(reader, GroupPart(index=0, done=done))
        self._sound.end()
        for part in self._late:
            self._call(reader, part)
        self._finish(done)
        return True

    def _shorten(self) -> bool:
        """Drop the oldest items. Returns False if there is nothing to drop."""
        fewer = shortened(self._entries, self.response.settings.truncation, self._hooks.sizes)
        if fewer is None:
            return False
        kept = {entry.id for entry in fewer}
        self._hooks.dropped([entry for entry in self._entries if entry.id not in kept])
        self._entries = fewer
        return True

    def _say_first(self) -> None:
        """Give the transcript of a model that speaks a text verbatim: the text itself."""
        if not converses(self._turn.service.model):
            self._writer.text(pending_text(self._entries))

    def _take(self, reader: AnswerReader, piece: GroupPart) -> None:
        for read in reader.read(piece):
            self._parts(reader, read)
            if read.chunk is not None and read.chunk.modality == "audio":
                self._hear(read.chunk)

    def _parts(self, reader: AnswerReader, read: AnswerPiece) -> None:
        for part in read.parts:
            match part:
                case Content(text):
                    self._sound.say(len(text))
                    self._writer.text(text)
                case CallBegin(_, text) | CallArguments(_, text):
                    self._sound.call(len(text))
                    if self._sound.is_waiting:
                        self._late.append(part)
                    else:
                        self._call(reader, part)
                case _:
                    pass

    def _call(self, reader: AnswerReader, part: CallBegin | CallArguments) -> None:
        match part:
            case CallBegin(index, name):
                self._writer.begin_call(name, reader.call_id(index))
            case CallArguments(_, text):
                self._writer.arguments(text)

    def _hear(self, chunk: EncodedChunk) -> None:
        if self._sound.push(np.frombuffer(chunk.data, "<i2").astype(np.int16, copy=False)):
            self._hooks.first_sound()

    def _finish(self, done: Completion) -> None:
        is_cut = done.finish_reason == "length"
        self._note("ok", 200)
        self._note_size()
        self._writer.end(
            "incomplete" if is_cut else "completed", reason="max_output_tokens" if is_cut else None, usage=done.usage
        )
        self._hooks.ended(self.response)

    def _fail(self, error: Exception) -> None:
        turn = self._turn
        reply = reply_of(error, turn.request_id)
        if not isinstance(error, MstarError):
            log.error("a response failed", exc_info=error)
        turn.service.count_refusal(reply, error)
        self._note(reply.code, reply.status)
        reason: StopReason | None = "client_cancelled" if reply.code == "cancelled" else None
        state: ResponseState = "failed" if reason is None else "cancelled"
        self._writer.end(state, reason=reason, error=reply, usage=self._usage_so_far())
        self._hooks.ended(self.response)

    def _note_size(self) -> None:
        """Tell the size of the answer to the conversation, which counts tokens when its context is full."""
        if self._session is not None:
            written = [output.entry for output in self.response.outputs]
            self._hooks.sizes.answered(written, self._session.encoder.text_tokens)

    def _usage_so_far(self) -> dict[str, Any]:
        if self._session is None:
            return {}
        prompt, text = self._session.live.prompt_tokens, self._session.encoder.text_tokens
        return {"prompt_tokens": prompt, "completion_tokens": text, "total_tokens": prompt + text}

    def _note(self, code: str, status: int) -> None:
        turn = self._turn
        turn.note(turn.request_id, code, status, turn.service.clock() - turn.started)


def turn_of(exchange: Exchange, number: int) -> Exchange:
    """Return the exchange of a request that a session makes: the session's, with an id and a start of its own."""
    now = exchange.service.clock()
    return replace(exchange, request_id=f"{exchange.request_id}-{number}", started=now, delivery=None)


class _SoundGate:
    """Sound of a response on its way to the client, in its format.

    A model that calls a function speaks the call as well, and its sound follows its text. So where there are functions,
    sound waits for the first content. Behind a call it waits for the end, when the share of the content in all text is
    sent.
    """

    def __init__(self, writer: ResponseWriter, response: RealtimeResponse, rate: int, *, has_tools: bool) -> None:
        self._writer = writer
        self._form = response.settings.spoken
        self._resampler = PieceResampler(rate, self._form.rate)
        self._is_spoken = response.settings.output == "audio"
        self._has_tools = has_tools
        self._held: list[Pcm] = []
        self._sent = 0
        self._said = 0
        self._called = 0

    @property
    def is_waiting(self) -> bool:
        """Return whether calls have to wait until the content before them has been spoken."""
        return self._is_spoken and self._said > 0

    def say(self, length: int) -> None:
        """Note so many characters of content."""
        self._said += length

    def call(self, length: int) -> None:
        """Note so many characters of a call."""
        self._called += length

    def push(self, samples: Pcm) -> bool:
        """Take sound of the model. Returns whether the first of it was sent."""
        self._held.append(samples)
        if self._called or (self._has_tools and not self._said):
            return False
        return self._send(self._take())

    def end(self) -> None:
        """Send what is due of the rest."""
        rest = self._take()
        if self._called:
            due = (self._sent + len(rest)) * self._said // (self._said + self._called) - self._sent
            rest = rest[: max(0, due)]
        if len(rest):
            self._send(rest)
        if self._sent:
            self._writer.late_sound(self._form.encode(self._resampler.flush()))

    def _take(self) -> Pcm:
        held, self._held = self._held, []
        return np.concatenate(held) if held else np.zeros(0, np.int16)

    def _send(self, samples: Pcm) -> bool:
        is_first = not self._sent
        self._sent += len(samples)
        self._writer.sound(len(samples), self._form.encode(self._resampler.push(samples)))
        return is_first
