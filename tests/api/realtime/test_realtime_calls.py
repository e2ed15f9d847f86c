"""POST /v1/realtime/calls with `aiortc` as the client: events on the data channel, sound on tracks."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from av import AudioFrame, AudioResampler

from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.api.realtime.sound.resampling import resampled_whole
from mstar_core.api.realtime.webrtc.call import RealtimeCall
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import LIMIT_S, Api, Started
from tests.api.realtime.client import Event, parsed, service_of
from tests.api.realtime.test_realtime_sound import spoken
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import SPEC

PATH = "/v1/realtime/calls"
RATE, TRACK_RATE = 24_000, 48_000
FRAME = 960


class Microphone(MediaStreamTrack):  # type: ignore[misc]  # aiortc has no types
    """A track that plays sound once, and is silent then. At the speed of its sound."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.waiting = np.zeros(0, np.int16)
        self._sent, self._begin = 0, asyncio.get_running_loop().time()

    def say(self, samples: np.ndarray) -> None:
        self.waiting = np.concatenate([self.waiting, resampled_whole(samples, RATE, TRACK_RATE)])

    async def recv(self) -> AudioFrame:
        await asyncio.sleep(self._begin + 0.02 * self._sent - asyncio.get_running_loop().time())
        samples, self.waiting = self.waiting[:FRAME], self.waiting[FRAME:]
        frame = AudioFrame.from_ndarray(np.pad(samples, (0, FRAME - len(samples)))[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = TRACK_RATE, self._sent * FRAME, Fraction(1, TRACK_RATE)
        self._sent += 1
        return frame


class Caller:
    """A WebRTC client. events: those of the data channel. heard: samples of the model's track, at 48 kHz.

    answer: SDP of the api.
    """

    def __init__(self) -> None:
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.microphone = Microphone()
        self.events: list[Event] = []
        self.heard: list[np.ndarray] = []
        self.news = asyncio.Event()
        self.answer = ""
        self.peer.addTrack(self.microphone)
        self.channel = self.peer.createDataChannel("oai-events")
        self.channel.on("message", self._take)
        self.peer.on("track", lambda track: self._tasks.append(asyncio.create_task(self._listen(track))))
        self._tasks: list[asyncio.Task[None]] = []

    def _take(self, message: str) -> None:
        self.events.append(parsed(message))
        self.news.set()

    async def _listen(self, track: Any) -> None:
        mono = AudioResampler(format="s16", layout="mono", rate=TRACK_RATE)
        while True:
            frame = await track.recv()
            self.heard += [part.to_ndarray().reshape(-1) for part in mono.resample(frame)]
            self.news.set()

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str) -> Event:
        """Wait for an event, and forget those before it."""
        while True:
            for number, event in enumerate(self.events):
                if event["type"] == kind:
                    self.events = self.events[number + 1 :]
                    return event
            self.news.clear()
            async with asyncio.timeout(LIMIT_S):
                await self.news.wait()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.news.clear()
                await self.news.wait()

    @property
    def loud_s(self) -> float:
        """Seconds of the model's track that are not silent."""
        return sum(int((abs(part.astype(int)) > 100).sum()) for part in self.heard) / TRACK_RATE

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.peer.close()


@asynccontextmanager
async def calling(api: Api, session: dict[str, Any] | None = None) -> AsyncIterator[Caller]:
    """Call, and read `session.created`. session: fields beside the offer, as a form."""
    caller = Caller()
    try:
        await caller.peer.setLocalDescription(await caller.peer.createOffer())
        sdp = caller.peer.localDescription.sdp
        if session is None:
            answer = await api.client.post(PATH, content=sdp, headers={"Content-Type": "application/sdp"})
        else:
            answer = await api.client.post(PATH, files={"sdp": (None, sdp), "session": (None, json.dumps(session))})
        assert answer.status_code == 201, answer.text
        assert answer.headers["content-type"] == "application/sdp"
        caller.answer = answer.text
        await caller.peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        created = await caller.until("session.created")
        assert answer.headers["location"] == f"{PATH}/{created['session']['id']}"
        yield caller
    finally:
        await caller.close()


def sound(seconds: int) -> np.ndarray:
    """Return a tone of 440 Hz; Opus removes constant samples."""
    return np.rint(8000 * np.sin(2 * np.pi * 440 * np.arange(seconds * RATE) / RATE)).astype(np.int16)


def tone(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: one second of a tone, and its text."""
    fake.text(request.handle, b"one two")
    fake.audio_of(request.handle, sound(1))
    fake.finish(request.handle)


def long(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: a minute."""
    fake.text(request.handle, b"one two three four five six")
    fake.audio_of(request.handle, sound(60))
    fake.finish(request.handle)


async def test_a_spoken_question_is_answered_on_the_track(started: Started) -> None:
    async with started(tone, model=SPEC) as api, calling(api) as caller:
        caller.microphone.say(spoken())
        await caller.until("input_audio_buffer.speech_started")
        await caller.until("input_audio_buffer.committed")
        begun = await caller.until("output_audio_buffer.started")
        done = (await caller.until("response.done"))["response"]
        stopped = await caller.until("output_audio_buffer.stopped")
        assert begun["response_id"] == stopped["response_id"] == done["id"] and done["status"] == "completed"
        assert "[audio" in api.fake.prompt(api.fake.requests[0])
        await caller.wait(lambda: caller.loud_s > 0.4)
        assert not [event for event in caller.events if event["type"] == "response.output_audio.delta"]


async def test_speech_cuts_the_answer_where_the_track_had_been_played_to(started: Started) -> None:
    async with started(long, model=SPEC) as api:
        async with calling(api, {"type": "realtime", "instructions": "be brief"}) as caller:
            content = [{"type": "input_text", "text": "tell"}]
            item = {"type": "message", "role": "user", "content": content}
            caller.send("conversation.item.create", item=item)
            caller.send("response.create")
            await caller.until("output_audio_buffer.started")
            assert api.fake.prompt(api.fake.requests[0]).startswith("<system>be brief")
            caller.microphone.say(spoken())
            await caller.until("input_audio_buffer.speech_started")
            await caller.until("output_audio_buffer.cleared")
            cut = await caller.until("conversation.item.truncated")
            assert 0 < cut["audio_end_ms"] < 60_000
            (session,) = api.process.link.sessions()
            assert session.interrupts == 1
        await api.until(lambda: not len(service_of(api).sessions))


async def test_a_call_ends_by_its_id(started: Started) -> None:
    async with started(tone, model=SPEC) as api, calling(api) as caller:
        (session,) = service_of(api).sessions
        assert (await api.client.post(f"{PATH}/{session.id}/hangup")).status_code == 200
        await api.until(lambda: not len(service_of(api).sessions))
        assert (await api.client.post(f"{PATH}/{session.id}/hangup")).status_code == 404
        assert caller.channel is not None


async def test_a_call_says_why_it_ends(started: Started) -> None:
    async with started(tone, model=SPEC) as api, calling(api) as caller:
        (session,) = service_of(api).sessions
        service_of(api).sessions.end(session.id)
        assert (await caller.until("error"))["error"]["code"] == "draining"


async def test_an_event_that_the_data_channel_does_not_take_is_named_and_the_call_goes_on(started: Started) -> None:
    async with started(tone, model=SPEC) as api, calling(api, {"audio": {"input": {"turn_detection": None}}}) as caller:
        most = int(caller.peer.localDescription.sdp.partition("max-message-size:")[2].split()[0])
        second = base64.b64encode(sound(1).astype("<i2").tobytes()).decode()
        for _ in range(most // len(second) + 1):
            caller.send("input_audio_buffer.append", audio=second)
        caller.send("input_audio_buffer.commit")
        item_id = (await caller.until("input_audio_buffer.committed"))["item_id"]
        caller.send("conversation.item.retrieve", item_id=item_id)
        error = (await caller.until("error"))["error"]
        assert error["code"] == "event_too_large" and error["message"].startswith("conversation.item.retrieved: ")
        caller.send("conversation.item.delete", item_id=item_id)
        await caller.until("conversation.item.deleted")


async def test_events_wait_for_a_client_that_does_not_read_and_its_call_ends() -> None:
    """The client's transport is stopped before the events, so nothing of them is acknowledged."""

    async def received() -> None:
        while True:
            await call.receive()  # sound of its microphone that had come before

    caller, call = Caller(), RealtimeCall(lambda: RealtimeSettings(output="audio"), stall_s=0.1)
    try:
        await caller.peer.setLocalDescription(await caller.peer.createOffer())
        await caller.peer.setRemoteDescription(
            RTCSessionDescription(await call.answer(caller.peer.localDescription.sdp), "answer")
        )
        async with asyncio.timeout(LIMIT_S):
            await call._is_open.wait()
            await caller.peer.sctp.transport.transport.stop()
            event = json.dumps({"type": "session.updated", "text": "a" * 60_000})
            sent = 0
            ended = asyncio.create_task(received())
            while not ended.done():
                await call.send(event)
                sent += 1
                await asyncio.sleep(0)
        assert sent < 20
        with pytest.raises(asyncio.CancelledError):
            await ended
    finally:
        await call.close("")
        await caller.close()


async def test_a_page_of_another_origin_reads_the_name_of_its_call(started: Started) -> None:
    origin = "https://app.example"
    async with started(tone, model=SPEC, cors_origins=(origin,)) as api:
        answer = await api.client.post(PATH, content="x", headers={"Origin": origin, "Content-Type": "application/sdp"})
        assert "Location" in answer.headers["access-control-expose-headers"].split(", ")


async def test_a_call_whose_client_does_not_connect_ends() -> None:
    caller, call = Caller(), RealtimeCall(lambda: RealtimeSettings(output="audio"), open_s=0.01)
    try:
        await caller.peer.setLocalDescription(await caller.peer.createOffer())
        await call.answer(caller.peer.localDescription.sdp)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call.receive(), LIMIT_S)
    finally:
        await call.close("")
        await caller.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"content": "hello", "headers": {"Content-Type": "application/sdp"}}, 400),
        ({"data": {"session": "{}"}}, 400),
        ({"files": {"sdp": (None, "v=0"), "other": (None, "x")}}, 400),
        ({"json": [1]}, 400),
    ],
)
async def test_a_wrong_offer_is_refused_and_holds_no_session(
    sent: dict[str, Any], status: int, started: Started
) -> None:
    async with started(tone, model=SPEC) as api:
        answer = await api.client.post(PATH, **sent)
        assert answer.status_code == status, answer.text
        assert not len(service_of(api).sessions)
