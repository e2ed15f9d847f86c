"""While the user speaks, complete parts of the next prompt are read ahead, by requests without output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mstar_core.api.realtime.session import RealtimeSession
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.surface import Audio
from tests.api.conftest import Api, Started
from tests.api.realtime.client import conversing, service_of
from tests.api.realtime.test_realtime_sound import RATE, configure, spoken
from tests.fakes.conductor import FakeDeployment, echo
from tests.fakes.omni_model import SPEC

WINDOW_S = 0.5
WINDOWED = replace(
    SPEC, inputs=tuple(replace(each, window_s=WINDOW_S) if isinstance(each, Audio) else each for each in SPEC.inputs)
)


def read(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: answer, and end requests that only read."""
    if request.reads_only:
        fake.finish(request.handle)
    else:
        echo(fake, request)


def keep(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: answer, and leave requests that only read."""
    if not request.reads_only:
        echo(fake, request)


async def test_each_completed_window_is_read_once(started: Started) -> None:
    async with started(read, model=WINDOWED) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        await client.say("hi")
        lengths = [0.3, 0.4, 0.2, 0.3, 0.4]  # windows are complete after the second and the fourth piece
        seen = [1, 2, 2, 3, 4]
        for length, count in zip(lengths, seen, strict=True):
            await client.hear(np.full(int(length * RATE), 500, np.int16), piece=RATE)
            await api.fake.until(lambda count=count: len(api.fake.requests) >= count)  # type: ignore[misc]
            await api.until(lambda: not len(api.process.registry))
        prompts = [api.fake.prompt(request) for request in api.fake.requests]
        assert all(request.reads_only and request.session for request in api.fake.requests)
        assert prompts == ["<user>hi<assistant>"] + [
            f"<user>hi<user>[audio {int((number * WINDOW_S + 0.05) * 16_000)}]<assistant>" for number in (1, 2, 3)
        ]
        await client.send("input_audio_buffer.commit")
        await client.respond(output_modalities=["text"])
        answered = api.fake.requests[-1]
        assert not answered.reads_only and answered.session == api.fake.requests[0].session
        assert len(api.fake.requests) == 5
        assert len(client.of("response.created")) == 1 and not client.of("error")


async def test_a_detected_turn_is_read_ahead_and_answered(started: Started) -> None:
    async with started(read, model=WINDOWED) as api, conversing(api) as client:
        await configure(client, turn_detection={"type": "server_vad", "silence_duration_ms": 320})
        item_id = await client.say("hi")
        for piece in np.array_split(spoken(after_s=0.6), 12):
            await client.hear(piece)
            await client.send("conversation.item.retrieve", item_id=item_id)  # answered behind the sound
            await client.until("conversation.item.retrieved")
            await api.until(lambda: not is_reading(api))  # a window that is complete while another is read is left out
        if not client.of("response.done"):
            await client.until("response.done")
        kinds = [request.reads_only for request in api.fake.requests]
        assert kinds.count(False) == 1 and kinds.count(True) >= 2
        assert client.of("response.done")[0]["response"]["status"] == "completed"


def is_reading(api: Api) -> bool:
    """Return whether the only session reads ahead."""
    (session,) = service_of(api).sessions
    assert isinstance(session, RealtimeSession)
    task = session._dialect.conversation._ahead._task
    return task is not None and not task.done()


@pytest.mark.parametrize("event", ["input_audio_buffer.clear", "response.create", "close"])
async def test_what_is_read_ahead_is_cancelled_when_it_is_of_no_use(event: str, started: Started) -> None:
    async with started(keep, model=WINDOWED) as api:
        async with conversing(api) as client:
            await configure(client, turn_detection=None)
            await client.say("hi")
            await client.hear(np.full(RATE, 500, np.int16))
            reading = await api.fake.next_request()
            assert reading.reads_only
            if event != "close":
                await client.send(event)
                await api.fake.until(lambda: [each.handle for each in api.fake.cancels] == [reading.handle])
        await api.fake.until(lambda: [each.handle for each in api.fake.cancels][:1] == [reading.handle])
        await api.until(lambda: not len(api.process.registry))


async def test_a_failure_of_reading_ahead_is_not_seen(started: Started) -> None:
    def fail(fake: FakeDeployment, request: NewRequest) -> None:
        if request.reads_only:
            fake.fail(request.handle)
        else:
            echo(fake, request)

    async with started(fail, model=WINDOWED) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        await client.say("hi")
        await client.hear(np.full(RATE, 500, np.int16))
        await api.fake.next_request()
        await client.send("input_audio_buffer.commit")
        done = await client.respond(output_modalities=["text"])
        assert done["status"] == "completed" and not client.of("error")
