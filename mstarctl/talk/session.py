"""Loop of a voice conversation: sends turns and the microphone, plays answers, and interrupts them."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

import typer

from mstar_core.errors import ExitCode, MstarError
from mstarctl.client.realtime import Event, RealtimeConnection, error_of
from mstarctl.talk.answer import TalkAnswer
from mstarctl.talk.functions import CalledFunction, computed
from mstarctl.talk.lines import typed_lines
from mstarctl.talk.recorder import Microphone
from mstarctl.talk.settings import TalkSettings
from mstarctl.talk.turns import SoundTurn, TextTurn, Turn, pieces
from mstarctl.talk.view import SOUND, TalkView

QUIT: Final = "/quit"
STOP: Final = "stop"
"""`event_id` of events that end an answer. Their errors mean that it has ended already."""

PIECE_S: Final = 0.1
"""Length of one piece of a sound file."""


class TalkSession:
    """One conversation. Owned by the command."""

    def __init__(self, connection: RealtimeConnection, settings: TalkSettings, view: TalkView) -> None:
        self._connection, self._settings, self._view = connection, settings, view
        self._answer: TalkAnswer | None = None
        self._is_expecting = False
        """A response was requested and has not begun."""
        self._unheard: set[str] = set()
        """Items whose transcripts are awaited."""
        self._calls: list[CalledFunction] = []
        """Calls whose results the next lines are."""
        self._changed = asyncio.Event()
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_interrupted = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, turns: Sequence[Turn] | None) -> None:
        """Converse until the turns end; without turns, until stdin ends or, with a microphone alone, for ever.

        In a terminal errors of answers do not end the conversation. Raises Exit 130 after interrupts, and the first
        error that ends it.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_interrupt)
        microphone = None if self._settings.recorder is None else Microphone(self._settings.recorder)
        self._start(self._read())
        if microphone is not None:
            self._start(self._record(microphone))
        if turns is not None:
            self._start(self._converse(_each(turns)))
        elif self._settings.is_terminal:
            self._start(self._type())
        elif microphone is None:
            self._start(self._converse(_typed_turns()))
        try:
            await self._left
        finally:
            running = tuple(self._tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self._answer is not None:
                self._answer.cut()
            if microphone is not None:
                await microphone.stop()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the conversation. Its error ends the conversation."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self._left.done():
                self._left.set_exception(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _leave(self) -> None:
        if not self._left.done():
            self._left.set_result(None)

    # Turns of the user

    async def _converse(self, turns: AsyncIterator[Turn]) -> None:
        """Send turns, each after the answer of the one before, and leave."""
        async for turn in turns:
            await self._send(turn)
            await self._until(lambda: self._is_idle)
        self._leave()

    async def _type(self) -> None:
        """Send typed lines, which interrupt the answer, and leave when they end."""
        async for line in typed_lines():
            if line == QUIT:
                break
            await self._interrupt()
            await self._until(lambda: self._answer is None and not self._is_expecting)
            await self._send(TextTurn(line))
        self._leave()

    async def _send(self, turn: Turn) -> None:
        self._is_interrupted = False
        send = self._connection.send
        match turn:
            case TextTurn(text) if self._calls:
                call = self._calls.pop(0)
                await send("conversation.item.create", item=call.result(text))
                if self._calls:
                    self._view.wants(self._calls[0])
                    return
            case TextTurn(text):
                content = [{"type": "input_text", "text": text}]
                await send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
            case SoundTurn():
                await self._speak(turn)
                await send("input_audio_buffer.commit")
        self._is_expecting = True
        await send("response.create")

    async def _speak(self, turn: SoundTurn) -> None:
        """Send the sound of a turn, at the speed at which it sounds unless the settings say otherwise."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for piece in pieces(turn.pcm, PIECE_S):
            await self._append(piece)
            due += PIECE_S
            if not self._settings.is_fast:
                await asyncio.sleep(due - loop.time())

    async def _append(self, pcm: bytes) -> None:
        await self._connection.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def _record(self, microphone: Microphone) -> None:
        async for pcm in microphone.pieces():
            is_muted = not self._settings.interrupts and self._answer is not None
            await self._append(bytes(len(pcm)) if is_muted else pcm)

    # Interrupts

    def _on_interrupt(self) -> None:
        """Handle Ctrl-C: end the answer; without one, or outside a terminal, the conversation."""
        is_answering = self._is_expecting or (self._answer is not None and self._answer.is_live)
        if not self._settings.is_terminal or (self._is_interrupted and not is_answering):
            if not self._left.done():
                self._left.set_exception(typer.Exit(ExitCode.INTERRUPTED))
            return
        self._is_interrupted = True
        if is_answering:
            self._start(self._interrupt())
        else:
            self._view.say("\nCtrl-C again, Ctrl-D or /quit leaves")

    async def _interrupt(self) -> None:
        """End the answer at once, and leave in the conversation what was heard of it."""
        answer = self._answer
        if answer is None or not answer.is_live:
            if self._is_expecting:
                await self._connection.send("response.cancel", event_id=STOP)
            return
        has_sound = bool(answer.sound)
        heard_ms = answer.cut()
        if has_sound:
            place = {"item_id": answer.item_id, "content_index": answer.part, "audio_end_ms": heard_ms}
            await self._connection.send("conversation.item.truncate", event_id=STOP, **place)
        elif not answer.is_done:
            await self._connection.send("response.cancel", event_id=STOP)
        self._view.interrupted(answer, heard_ms)
        self._view.end(answer)
        if answer.is_done:
            self._forget(answer)

    # Events of the server

    async def _read(self) -> None:
        while True:
            event = await self._connection.receive()
            self._view.event(event)
            try:
                await self._take(event)
            except MstarError as error:
                if not self._settings.is_terminal:
                    raise
                self._view.problem(error)
            self._changed.set()

    async def _take(self, event: Event) -> None:
        match event["type"]:
            case "error" if event["error"].get("event_id") != STOP:
                raise error_of(event["error"])
            case "input_audio_buffer.speech_started":
                self._is_interrupted = False
                await self._interrupt()
            case "input_audio_buffer.committed" if self._settings.has_transcripts:
                self._unheard.add(event["item_id"])
            case "conversation.item.input_audio_transcription.completed":
                self._unheard.discard(event["item_id"])
                self._view.user(event["transcript"])
            case "conversation.item.input_audio_transcription.failed":
                self._unheard.discard(event["item_id"])
                self._view.say(f"[no transcript: {event['error'].get('message')}]")
            case "response.created":
                self._is_expecting = False
                self._calls.clear()  # another turn goes on without their results
                self._answer = TalkAnswer(event["response"]["id"])
            case "response.done":
                self._done(event["response"])
            case _:
                if self._answer is not None and event.get("response_id") == self._answer.response_id:
                    self._grow(self._answer, event)

    def _grow(self, answer: TalkAnswer, event: Event) -> None:
        """Add output to the answer, unless it has been interrupted."""
        if answer.is_cut:
            return
        match event["type"]:
            case "response.content_part.added":
                answer.item_id, answer.part = event["item_id"], event["content_index"]
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                answer.text += event["delta"]
                self._view.text(event["delta"])
            case "response.function_call_arguments.done":
                answer.has_calls = True
            case kind if kind == SOUND:
                answer.add(base64.b64decode(event["delta"]), self._settings.player)

    def _done(self, response: dict[str, Any]) -> None:
        """Note the end of a response. Raises its error."""
        answer = self._answer
        if answer is None or answer.response_id != response["id"]:
            return
        answer.is_done = True
        if answer.is_cut:
            self._forget(answer)
            return
        self._start(self._finish(answer))
        details = response.get("status_details") or {}
        match response["status"]:
            case "failed":
                raise error_of(details.get("error") or {})
            case "incomplete":
                self._view.say(f"[the answer is incomplete: {details.get('reason')}]")
            case "completed":
                calls = [CalledFunction.of(item) for item in response["output"] if item["type"] == "function_call"]
                if calls:
                    self._called(calls)

    def _called(self, calls: list[CalledFunction]) -> None:
        """Compute the results of calls, or wait for typed ones."""
        for call in calls:
            self._view.call(call)
        if self._settings.command:
            self._is_expecting = True
            self._start(self._compute(calls))
        else:
            self._calls = calls
            self._view.wants(calls[0])

    async def _compute(self, calls: list[CalledFunction]) -> None:
        for call in calls:
            output = await computed(self._settings.command, call)
            await self._connection.send("conversation.item.create", item=call.result(output))
        await self._connection.send("response.create")

    async def _finish(self, answer: TalkAnswer) -> None:
        """Complete an answer after its sound."""
        if answer.playback is not None:
            answer.playback.end()
            await answer.playback.wait()
        if not answer.is_cut:
            self._view.end(answer)
            self._forget(answer)

    def _forget(self, answer: TalkAnswer) -> None:
        if self._answer is answer:
            self._answer = None
        self._changed.set()

    @property
    def _is_idle(self) -> bool:
        """Whether the turn has its answer, all of it has been heard, and its transcript is there."""
        return self._answer is None and not self._is_expecting and not self._unheard

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


async def _each(turns: Sequence[Turn]) -> AsyncIterator[Turn]:
    for turn in turns:
        yield turn


async def _typed_turns() -> AsyncIterator[Turn]:
    async for line in typed_lines():
        if line == QUIT:
            return
        yield TextTurn(line)
