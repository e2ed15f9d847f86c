"""Client of one spoken conversation: a microphone that never closes, and a player's clock."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.errors import MstarError
from mstarctl.bench.conversation.outcome import ConversationOutcome, TurnOutcome
from mstarctl.bench.conversation.plan import PlannedTurn
from mstarctl.client.realtime import RATE, Event, RealtimeAddress, RealtimeConnection, conversation, error_of

FRAME_S: Final = 0.02
SILENCE: Final = bytes(2 * round(FRAME_S * RATE))
LEEWAY_MS: Final = 500
"""Sound before the detected start that belongs to it (300 ms), and the delay of the detection."""


class ConversationClient:
    """One conversation. Owned by the run. outcome: filled while it runs."""

    def __init__(self, connection: RealtimeConnection, timeout_s: float, ends: float | None = None) -> None:
        """ends: time of the loop behind which no turn begins."""
        self._connection, self._timeout_s, self._ends = connection, timeout_s, ends
        self.outcome = ConversationOutcome()
        self._speech = b""
        self._sent_ms = 0.0
        self._spoken_ms: list[tuple[float, float]] = []
        self._responses: dict[str, TurnOutcome] = {}
        self._item_id, self._speaking = "", TurnOutcome()
        self._changed = asyncio.Event()

    async def run(self, plan: Iterable[PlannedTurn]) -> None:
        """Speak all turns. Raises the error that ends the conversation."""
        work = [asyncio.create_task(part) for part in (self._record(), self._read(), self._speak(plan))]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _record(self) -> None:
        """Send the microphone in real time: speech if there is some, else silence."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            piece, self._speech = self._speech[: len(SILENCE)], self._speech[len(SILENCE) :]
            self._sent_ms += 1000 * FRAME_S
            self.outcome.lags_s.append(max(0.0, loop.time() - due))
            frame = base64.b64encode(piece.ljust(len(SILENCE), b"\0")).decode()
            await self._connection.send("input_audio_buffer.append", audio=frame)
            if piece and not self._speech:
                self._changed.set()
            due += FRAME_S
            await asyncio.sleep(due - loop.time())

    async def _speak(self, plan: Iterable[PlannedTurn]) -> None:
        loop = asyncio.get_running_loop()
        is_interrupting = False
        for turn in plan:
            if self._ends is not None and loop.time() >= self._ends:
                break
            if not is_interrupting:
                await asyncio.sleep(turn.pause_s)
            now = self._speaking = TurnOutcome()
            self.outcome.turns.append(now)
            self._spoken_ms.append((self._sent_ms, self._sent_ms + 1000 * turn.sound.seconds))
            self._speech = turn.sound.pcm
            await self._until(lambda: not self._speech, turn.sound.seconds + self._timeout_s)
            now.spoken = loop.time()
            is_interrupting = turn.interrupt_s is not None and await self._heard(now, turn.interrupt_s)
            if not is_interrupting:
                await self._hear_out(now)
        if is_interrupting:  # by a turn that does not begin any more
            await self._hear_out(self._speaking)

    async def _hear_out(self, turn: TurnOutcome) -> None:
        """Wait for the end of an answer, and play it."""
        await self._until(lambda: bool(turn.status), self._timeout_s)
        await asyncio.sleep(max(0.0, sum(turn.lengths) - turn.heard_s(asyncio.get_running_loop().time())))

    async def _heard(self, turn: TurnOutcome, seconds: float) -> bool:
        """Wait until this much of an answer was heard. Returns False if it ended before."""
        if not await self._until(lambda: bool(turn.marks or turn.status), self._timeout_s) or not turn.marks:
            return False
        loop = asyncio.get_running_loop()
        while turn.heard_s(loop.time()) < seconds:
            if turn.status and sum(turn.lengths) < seconds:
                return False
            await asyncio.sleep(FRAME_S)
        return True

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition. Returns whether it holds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        while True:
            await self._take(await self._connection.receive(), asyncio.get_running_loop().time())
            self._changed.set()

    async def _take(self, event: Event, now: float) -> None:
        match event["type"]:
            case "error":
                self.outcome.errors.append(str(error_of(event["error"])))
            case "input_audio_buffer.speech_started":
                await self._started(event["audio_start_ms"], now)
            case "input_audio_buffer.speech_stopped":
                if not self._speaking.marks:
                    self._speaking.stopped = now
            case "response.created":
                self._responses[event["response"]["id"]] = self._speaking
            case "response.output_audio.delta":
                turn = self._responses[event["response_id"]]
                turn.marks.append(now)
                turn.lengths.append(len(base64.b64decode(event["delta"])) / 2 / RATE)
                self._item_id = event["item_id"]
            case "response.done":
                self._done(event["response"])

    async def _started(self, start_ms: float, now: float) -> None:
        """Note the begin of speech, which stops the playback of the answer before."""
        if not any(begin - LEEWAY_MS <= start_ms <= end for begin, end in self._spoken_ms):
            self.outcome.false_starts += 1
        if self._spoken_ms and start_ms <= self._spoken_ms[-1][1]:
            self._split()
        before = next((turn for turn in reversed(self.outcome.turns) if turn.marks), None)
        if before is None or before.interrupted is not None:
            return
        heard_s = before.heard_s(now)
        if before.status and heard_s >= sum(before.lengths):
            return
        before.interrupted = now
        place = {"item_id": self._item_id, "content_index": 0, "audio_end_ms": int(1000 * heard_s)}
        await self._connection.send("conversation.item.truncate", **place)

    def _split(self) -> None:
        """Drop an answer to the turn that is still spoken: a pause in it had ended it."""
        early = [response_id for response_id, turn in self._responses.items() if turn is self._speaking]
        if early:
            self._responses.update({response_id: TurnOutcome() for response_id in early})
            self._speaking.split()

    def _done(self, response: dict[str, Any]) -> None:
        turn = self._responses[response["id"]]
        details = response.get("status_details") or {}
        reason = str(details.get("reason") or (details.get("error") or {}).get("code") or "")
        turn.status, turn.reason = response["status"], reason
        turn.count_tokens(response.get("usage") or {})
        if turn.status == "failed":
            self.outcome.errors.append(str(error_of(details.get("error") or {})))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Load of conversations. turns: of each; 0 with `duration_s`. params: fields of their sessions."""

    address: RealtimeAddress
    model: str
    timeout_s: float
    turns: int = 0
    duration_s: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    async def hold(self, plans: Sequence[Iterable[PlannedTurn]]) -> list[ConversationOutcome]:
        """Hold all conversations at once. An error ends its conversation alone."""
        ends = None if self.duration_s is None else asyncio.get_running_loop().time() + self.duration_s
        return list(await asyncio.gather(*(self._one(plan, ends) for plan in plans)))

    async def _one(self, plan: Iterable[PlannedTurn], ends: float | None) -> ConversationOutcome:
        outcome = ConversationOutcome()
        try:
            async with conversation(self.address, self.model) as connection:
                turns = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
                await connection.configure({**self.params, **turns})
                client = ConversationClient(connection, self.timeout_s, ends)
                outcome = client.outcome
                await client.run(plan)
        except MstarError as error:
            outcome.errors.append(str(error))
        outcome.turns += [TurnOutcome() for _ in range(self.turns - len(outcome.turns))]
        return outcome
