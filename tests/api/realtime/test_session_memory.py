"""Memory of a realtime session: bounded while it lasts, and free once it has ended."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

from mstar_core.api.errors import EventsGone
from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.preprocess.forms import Reader
from mstar_core.api.realtime.chat_form import chat_layout
from mstar_core.api.realtime.event_log import KEPT_S, SentEvents
from mstar_core.api.realtime.items import MessageEntry, SpokenPart, sounds_of
from mstar_core.api.realtime.response_run import ResponseRun
from mstar_core.api.realtime.session import RealtimeSession
from mstar_core.api.requests.open_sessions import OpenSessions
from mstar_core.api.requests.registry import LiveRequest
from mstar_core.codec import WAV_HEADER_BYTES
from mstar_core.messages.telemetry import REALTIME, SessionNews
from mstar_core.plugin.processor import Inputs
from tests.api.conftest import Started
from tests.api.realtime.client import conversing, service_of
from tests.api.realtime.test_realtime_sound import RATE, configure
from tests.fakes.conductor import FakeDeployment, NewRequest
from tests.fakes.omni_model import SPEC

EVENT = bytes(1000)
TURNS = 5
HEARD_S = 0.5


class Clock:
    """A clock that a test moves forward, on top of the time that passes."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def speak(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: four words and 1 s of sound."""
    for word in (b"one ", b"two ", b"three ", b"four"):
        fake.text(request.handle, word)
        fake.audio(request.handle, RATE // 4)
    fake.finish(request.handle)


def begin(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: one word and its sound, and no end."""
    fake.text(request.handle, b"one ")
    fake.audio(request.handle, RATE // 4)


async def taken(sent: SentEvents, count: int) -> None:
    """Add events, and take them as a connection does."""
    for _ in range(count):
        sent.add(EVENT)
        await sent.next()


async def test_events_are_dropped_once_an_open_connection_must_have_delivered_them() -> None:
    clock = Clock()
    sent = SentEvents(clock)
    await taken(sent, 3)
    clock.ahead_s += KEPT_S / 2
    await taken(sent, 2)
    assert sent.kept_bytes == 5 * len(EVENT)
    clock.ahead_s += KEPT_S / 2 + 1
    sent.forget_received()
    assert sent.kept_bytes == 2 * len(EVENT)
    with pytest.raises(EventsGone):
        sent.rewind(2)
    sent.rewind(3)
    clock.ahead_s += 2 * KEPT_S
    assert [await sent.next(), await sent.next()] == [EVENT, EVENT], "events that were not taken have no age"


async def test_events_stay_while_there_is_no_connection() -> None:
    clock = Clock()
    sent = SentEvents(clock)
    await taken(sent, 2)
    clock.ahead_s += 2 * KEPT_S
    sent.add(EVENT)
    sent.rewind(1)
    assert sent.kept_bytes == 3 * len(EVENT) and sent.waiting_bytes == 2 * len(EVENT)
    await sent.next()
    await sent.next()
    assert sent.kept_bytes == 2 * len(EVENT), "the new connection has shown what its client has"


async def test_a_conversation_keeps_the_sound_of_its_items_and_a_minute_of_events(started: Started) -> None:
    clock = Clock()
    async with started(speak, model=SPEC) as api:
        service = service_of(api)
        service.clock = clock
        async with conversing(api) as client:
            await configure(client, turn_detection=None)
            (session,) = service.sessions
            assert isinstance(session, RealtimeSession)
            conversation, kept = session._dialect.conversation, []
            for _ in range(TURNS):
                await client.hear(np.full(int(HEARD_S * RATE), 500, np.int16))
                await client.send("input_audio_buffer.commit")
                assert (await client.respond())["status"] == "completed"
                kept.append(session.sent.kept_bytes)
                clock.ahead_s += KEPT_S + 1
            sounds = sounds_of(conversation.history)
            assert max(kept[1:]) < 1.2 * min(kept[1:]), "events of earlier turns are kept"
            assert [len(part.samples) for part in sounds] == [int(HEARD_S * 16_000)] * TURNS
            assert all(len(part.file) == WAV_HEADER_BYTES + part.samples.nbytes for part in sounds)
            first, second = (chat_layout("", list(conversation.history)).files.values() for _ in range(2))
            for part, one, other in zip(sounds, first, second, strict=True):
                assert part.file is one is other, "requests do not share the file of an item"
            entries = [entry for entry in conversation.history if isinstance(entry, MessageEntry)]
            spoken = [part.spoken for entry in entries for part in entry.parts if isinstance(part, SpokenPart)]
            assert [speech.text for speech in spoken] == ["one two three four"] * TURNS
            assert not any(speech.marks for speech in spoken), "marks of whole speech are kept"
        await api.until(lambda: not len(service.sessions) and not session.sent.kept_bytes)
        assert not len(conversation.history) and not len(conversation._buffer)


@pytest.mark.parametrize("ends", ["finished", "cancelled"])
async def test_a_request_that_has_ended_is_free_without_a_collection(ends: str, started: Started) -> None:
    """Cycles would hold the inputs of a conversation, which grow with it, until a full collection."""

    def held() -> int:
        kinds = LiveRequest | Inputs | OutputQueue | Reader | ResponseRun
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    async with started(speak if ends == "finished" else begin, model=SPEC) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        await client.hear(np.full(int(HEARD_S * RATE), 500, np.int16))
        await client.send("input_audio_buffer.commit")
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(3):
                await client.send("response.create")
                if ends == "cancelled":
                    await client.until("response.output_audio.delta")
                    await client.send("response.cancel")
                await client.until("response.done")
            await api.clean()
            await api.until(lambda: held() <= before)
        finally:
            gc.enable()


class Ended:
    """A session that ends at once."""

    def __init__(self, number: int) -> None:
        self.id, self.key = str(number), ""

    def news(self) -> SessionNews:
        return SessionNews(id=self.id, kind=REALTIME, speaks="silence", began=0.0)

    async def close(self) -> None:
        """Return at once."""


async def test_memory_is_given_back_once_after_sessions_that_ended_together() -> None:
    threads: list[int] = []
    loop, freed = asyncio.get_running_loop(), asyncio.Event()

    def give_back() -> None:
        threads.append(threading.get_ident())
        loop.call_soon_threadsafe(freed.set)

    sessions = OpenSessions(4, on_freed=give_back, calm_s=0.0)
    for number in range(4):
        sessions.add(Ended(number))
    for number in range(4):
        sessions.end(str(number))
    await asyncio.wait_for(freed.wait(), 60.0)
    await sessions.close()
    assert len(threads) == 1 and threads[0] != threading.get_ident()
