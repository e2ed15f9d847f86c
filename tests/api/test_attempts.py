"""Requests that outlive the processes which run them: parked, sent again, and continued where they stopped."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.output.spool import Spool
from mstar_core.api.requests.record import AttemptRecord, Journal, SavedLoops
from mstar_core.messages.flow import Drawn
from mstar_core.messages.life import PeerDown, ServiceState, Telemetry
from mstar_core.messages.requests import NewRequest, Resume, SavedLoop
from mstar_core.messages.tensors import InlineTensor, ShmTensor
from mstar_core.plugin.spec import Unresumable
from tests.api.conftest import LIMITS, Api, Started
from tests.fakes.conductor import FakeDeployment, begin
from tests.fakes.speech_model import LARGE_BYTES, SPEC

GOOD = {"text": "x", "output_modalities": "audio", "request_id": "r"}
SAMPLES = np.arange(9000, dtype=np.int16)
"""The whole sound of a request."""


@dataclasses.dataclass
class Sound:
    """The lines of a stream so far."""

    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def pcm(self) -> bytes:
        return b"".join(base64.b64decode(each["data"]) for each in self.lines if each["modality"] == "audio")

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [each["metadata"] for each in self.lines if each["modality"] == "error"]


@asynccontextmanager
async def stream(api: Api, **fields: Any) -> AsyncIterator[Sound]:
    """Read a stream to its end in the background; leaving the block waits for that."""
    sound = Sound()

    async def read() -> None:
        async with api.client.stream("POST", "/generate", data={**GOOD, **fields}) as answer:
            async for line in answer.aiter_lines():
                if line:
                    sound.lines.append(json.loads(line))

    reading = asyncio.create_task(read())
    try:
        yield sound
        await reading
    finally:
        reading.cancel()


def send(fake: FakeDeployment, request: NewRequest, *, start: int = 0, stop: int = len(SAMPLES), size: int) -> None:
    """Send a part of the sound in chunks of `size` samples."""
    for at in range(start, stop, size):
        fake.audio_of(request.handle, SAMPLES[at : min(at + size, stop)])


async def heard(api: Api, sound: Sound, samples: int) -> None:
    await api.until(lambda: len(sound.pcm) >= 2 * samples)


async def test_a_stream_goes_on_after_the_death_of_its_worker_without_repeating_a_sample(started: Started) -> None:
    async with started() as api:
        async with stream(api) as sound:
            first = await api.fake.next_request()
            assert first.is_journaled and first.resume is None
            drawn = Drawn(handle=first.handle, place="LLM.2/loop", start=0, ids=[5, 6, 7])
            api.fake.audio_of(first.handle, SAMPLES[:4000], drawn=[drawn])
            await heard(api, sound, 4000)
            api.fake.lose(first.handle)
            second = await api.fake.next_request(2)
            assert second.handle != first.handle and second.request_id == first.request_id
            assert second.resume == Resume(attempt=2, ids={"LLM.2/loop": [5, 6, 7]}, delivered={"pcm": 4000})
            assert second.deadline_s < first.deadline_s
            state = (await api.client.get("/v1/requests/r")).json()
            assert state["status"] == "resuming" and state["attempts"][0] == {
                "attempt": 1,
                "cause": "a worker died",
                "pause_s": None,
            }
            api.fake.audio_of(first.handle, SAMPLES[4000:5000])  # of the old attempt, too late
            send(api.fake, second, size=1100)
            api.fake.finish(second.handle)
        assert sound.pcm == SAMPLES.tobytes() and not sound.errors
        state = (await api.client.get("/v1/requests/r")).json()
        assert state["status"] == "finished" and [each["attempt"] for each in state["attempts"]] == [1, 2]
        assert state["attempts"][1]["pause_s"] >= 0
        text = (await api.client.get("/metrics")).text
        assert 'mstar_request_attempts_total{process="worker"} 1.0' in text
        assert "mstar_request_pause_seconds_count 1.0" in text and "mstar_late_messages_total 1.0" in text


async def test_a_stream_of_events_is_kept_alive_while_its_request_is_parked(started: Started) -> None:
    async with started(keepalive_s=0.02) as api:
        api.fake.script = begin
        body = {"input": "x", "stream_format": "sse"}
        async with api.client.stream("POST", "/v1/audio/speech", json=body) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("data:"):
                pass
            api.fake.down("conductor", "killed by signal 9", "the conductor died")
            await api.until(lambda: [live.state for live in api.process.registry] == ["resuming"])
            pings = 0
            while pings < 3:
                pings += (await anext(lines)).startswith(": ping")
        await api.clean()


async def test_a_stream_waits_for_the_next_conductor(started: Started) -> None:
    async with started() as api:
        async with stream(api, text="large") as sound:
            first = await api.fake.next_request()
            send(api.fake, first, stop=3000, size=1000)
            await heard(api, sound, 3000)
            assert api.process.link.loans == 1
            api.fake.down("conductor", "killed by signal 9", "the conductor died")
            await api.until(lambda: [live.state for live in api.process.registry] == ["resuming"])
            refused = await api.client.post("/generate", data={**GOOD, "request_id": "new"})
            assert refused.status_code == 503, "new requests are refused meanwhile"
            assert len(api.fake.requests) == 1
            api.fake.restart("conductor")
            second = await api.fake.next_request(2)
            picture = api.fake.input(second, "picture")
            assert picture.tolist() == [7] * LARGE_BYTES, "its tensors stay lent to the request"
            send(api.fake, second, size=700)
            api.fake.finish(second.handle)
        assert sound.pcm == SAMPLES.tobytes() and not sound.errors
        await api.clean()


async def test_a_worker_that_leaves_out_what_was_delivered_is_honoured(started: Started) -> None:
    async with started() as api, stream(api) as sound:
        first = await api.fake.next_request()
        send(api.fake, first, stop=4000, size=1000)
        await heard(api, sound, 4000)
        api.fake.lose(first.handle)
        second = await api.fake.next_request(2)
        api.fake.audio_of(second.handle, SAMPLES[3500:], skipped=3500)
        api.fake.finish(second.handle)
    assert sound.pcm == SAMPLES.tobytes()


async def test_what_was_left_out_without_being_delivered_is_an_error_and_no_gap(started: Started) -> None:
    async with started() as api, stream(api) as sound:
        first = await api.fake.next_request()
        send(api.fake, first, stop=4000, size=1000)
        await heard(api, sound, 4000)
        api.fake.lose(first.handle)
        second = await api.fake.next_request(2)
        api.fake.audio_of(second.handle, SAMPLES[4500:], skipped=4500)
    assert sound.pcm == SAMPLES[:4000].tobytes()
    assert [error["code"] for error in sound.errors] == ["engine_error"]


async def test_a_second_death_of_a_kind_is_laid_to_the_request(started: Started) -> None:
    async with started(begin) as api, stream(api) as sound:
        first = await api.fake.next_request()
        await heard(api, sound, 2048)
        api.fake.lose(first.handle, "worker-0")
        second = await api.fake.next_request(2)
        api.fake.lose(second.handle, "follower-1", "a worker stopped responding")
    assert [(error["code"], error["status"]) for error in sound.errors] == [("poison_request", 500)]
    assert b"a worker stopped responding" in base64.b64decode(sound.lines[-1]["data"])
    assert len(api.fake.requests) == 2 and not api.fake.cancels


async def test_deaths_of_two_kinds_are_survived_and_a_third_is_not(started: Started) -> None:
    async with started() as api, stream(api) as sound:
        first = await api.fake.next_request()
        api.fake.lose(first.handle, "worker-0")
        await api.fake.next_request(2)
        api.fake.down("conductor", "killed by signal 9", "the conductor died")
        await api.until(lambda: [live.state for live in api.process.registry] == ["resuming"])
        api.fake.restart("conductor")
        third = await api.fake.next_request(3)
        assert third.resume is not None and third.resume.attempt == 3
        send(api.fake, third, stop=1000, size=1000)
        await heard(api, sound, 1000)
        api.fake.lose(third.handle, "elsewhere", "a process died")
    assert [error["code"] for error in sound.errors] == ["worker_lost"]


async def test_restarts_on_purpose_do_not_count(started: Started) -> None:
    async with started() as api, stream(api) as sound:
        for count in range(1, 6):
            request = await api.fake.next_request(count)
            api.fake.lose(request.handle, "worker-0", "its worker is taken out of service", is_excused=count != 3)
        last = await api.fake.next_request(6)
        send(api.fake, last, size=4000)
        api.fake.finish(last.handle)
    assert sound.pcm == SAMPLES.tobytes() and not sound.errors


async def test_a_request_without_a_ready_replica_is_sent_again_to_wait_for_one(started: Started) -> None:
    async with started() as api:
        async with stream(api) as sound:
            first = await api.fake.next_request()
            api.fake.lose(first.handle, "", "no worker is available for this request")
            second = await api.fake.next_request(2)
            assert second.resume == Resume(attempt=1), "the first attempt has not begun"
            send(api.fake, second, size=4500)
            api.fake.finish(second.handle)
        assert sound.pcm == SAMPLES.tobytes()
        assert "attempts" not in (await api.client.get("/v1/requests/r")).json()


@pytest.mark.parametrize("how", ["by id", "disconnect", "operator"])
async def test_a_parked_request_can_be_cancelled(how: str, started: Started) -> None:
    async with started(begin) as api:
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        first = await api.fake.next_request()
        api.fake.lose(first.handle)
        second = await api.fake.next_request(2)
        match how:
            case "by id":
                await api.client.post("/v1/requests/r/cancel")
            case "disconnect":
                task.cancel()
            case "operator":  # known there by its first handle
                api.fake.cancel(first.handle)
        await api.fake.until(lambda: [each.handle for each in api.fake.cancels] == [second.handle])
        await api.clean()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_deadline_holds_while_a_request_is_parked(started: Started) -> None:
    async with started() as api:
        for limit in LIMITS:
            task = asyncio.create_task(api.client.post("/generate", data={**GOOD, "timeout_s": str(limit)}))
            await api.fake.until(lambda: bool(api.fake.requests) or task.done())  # noqa: B023
            if api.fake.requests:
                break
            await task
        api.fake.down("conductor", "killed by signal 9", "the conductor died")
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        await api.clean()


async def test_a_parked_request_fails_when_the_deployment_gives_up(started: Started) -> None:
    async with started() as api:
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.fake.next_request()
        api.fake.down("conductor", "killed by signal 9", "the conductor died")
        api.fake.tell(ServiceState(state="unhealthy", reason="its processes die repeatedly"))
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        await api.clean()


async def test_a_request_that_is_being_prepared_when_the_conductor_dies_waits_for_the_next_one(
    started: Started,
) -> None:
    async with started() as api:
        death = PeerDown(name="conductor", incarnation=0, cause="killed by signal 9", public="the conductor died")
        api.process.link.deployment.down["conductor"] = death
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        first = await api.fake.next_request()
        api.fake.lose(first.handle, "", "no worker is available for this request")
        second = await api.fake.next_request(2)
        send(api.fake, second, size=9000)
        api.fake.finish(second.handle)
        assert (await task).status_code == 200


async def test_a_model_may_declare_requests_that_cannot_be_resumed(started: Started) -> None:
    why = Unresumable(reason="its noise depends on other requests", params={"voice": "leo"})
    model = dataclasses.replace(SPEC, unresumable=(why,))
    async with started(model=model) as api:
        assert (await api.client.get("/v1/models")).json()["data"][0]["unresumable"] == [
            {"reason": "its noise depends on other requests", "params": {"voice": "leo"}}
        ]
        task = asyncio.create_task(api.client.post("/generate", data={**GOOD, "voice": "leo"}))
        first = await api.fake.next_request()
        assert not first.is_journaled
        api.fake.lose(first.handle)
        answer = await task
        assert answer.status_code == 503
        assert "its noise depends on other requests" in answer.json()["error"]["message"]
        other = asyncio.create_task(api.client.post("/generate", data={**GOOD, "request_id": "s"}))
        api.fake.lose((await api.fake.next_request(2)).handle)
        assert (await api.fake.next_request(3)).resume is not None
        other.cancel()
        await api.fake.until(lambda: len(api.fake.cancels) == 1)


async def test_an_end_whose_outputs_died_with_their_worker_is_computed_again(started: Started) -> None:
    async with started() as api, stream(api) as sound:
        first = await api.fake.next_request()
        send(api.fake, first, stop=3000, size=1500)
        await heard(api, sound, 3000)
        api.fake.finish(first.handle, emitted=6)
        await api.until(lambda: [live.is_over for live in api.process.registry] == [True])
        api.fake.down("worker-0", "killed by signal 9", "a worker died")
        second = await api.fake.next_request(2)
        send(api.fake, second, size=1500)
        api.fake.finish(second.handle)
    assert sound.pcm == SAMPLES.tobytes() and not sound.errors


async def test_outputs_that_are_lost_with_restarts_on_purpose_do_not_make_a_request_poison(started: Started) -> None:
    async with started() as api, stream(api) as sound:
        for count in range(1, 4):
            request = await api.fake.next_request(count)
            api.fake.finish(request.handle, emitted=6)
            await api.until(lambda: [live.is_over for live in api.process.registry] == [True])
            api.fake.down("worker-0", "it is being restarted", "the deployment is restarting", is_excused=True)
            api.fake.restart("worker-0")
        last = await api.fake.next_request(4)
        send(api.fake, last, size=1500)
        api.fake.finish(last.handle)
    assert sound.pcm == SAMPLES.tobytes() and not sound.errors


async def test_the_operator_is_told_of_losses_and_pauses_under_the_first_handle(started: Started) -> None:
    async with started(begin) as api:
        async with stream(api) as sound:
            first = await api.fake.next_request()
            await heard(api, sound, 2048)
            api.fake.lose(first.handle)
            second = await api.fake.next_request(2)
            api.fake.audio(second.handle, 4096)
            api.fake.finish(second.handle)
        await api.clean()
        await api.fake.until(lambda: any(e[0] == "request.resumed" for t in api.fake.of(Telemetry) for e in t.events))
        events = [event for report in api.fake.of(Telemetry) for event in report.events]
        assert [kind for kind, _ in events] == ["request.parked", "request.resumed"]
        assert events[0][1] == {"request": "r", "attempt": 1, "process": "worker-0", "cause": "a worker died"}
        assert events[1][1]["attempt"] == 2 and events[1][1]["pause_s"] >= 0
        news = [each for report in api.fake.of(Telemetry) for each in report.requests]
        assert {each.handle for each in news} == {first.handle}
        (end,) = [each for report in api.fake.of(Telemetry) for each in report.requests if each.ended is not None]
        assert (end.current, end.attempts, end.causes) == (second.handle, 2, ["worker-0: a worker died"])
        assert end.pauses_s is not None and len(end.pauses_s) == 1


async def test_the_record_of_a_request_survives_serialization(started: Started) -> None:
    async with started() as api:
        async with stream(api) as sound:
            first = await api.fake.next_request()
            drawn = Drawn(handle=first.handle, place="LLM.2/loop", start=0, ids=[5, 6, 7])
            api.fake.audio_of(first.handle, SAMPLES[:4000], drawn=[drawn])
            await heard(api, sound, 4000)
            api.fake.lose(first.handle)
            second = await api.fake.next_request(2)
            (live,) = api.process.registry
            record = live.record
            assert record is not None
            copy = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=AttemptRecord)
            assert copy == record and copy.message(9, 0.0).resume == record.message(9, 0.0).resume
            assert copy.message(9, 0.0).resume == Resume(
                attempt=3, ids={"LLM.2/loop": [5, 6, 7]}, delivered={"pcm": 4000}
            )
            send(api.fake, second, size=3000)
            api.fake.finish(second.handle)


async def test_ids_that_an_earlier_api_knew_are_sent_with_the_request(started: Started) -> None:
    async with started() as api:
        sent: list[NewRequest] = []
        manager = api.process.link.attempts
        manager.submit = sent.append
        journal = Journal()
        journal.add(Drawn(handle=1, place="LLM", start=0, ids=[5, 6]))
        now = manager.clock()
        with api.process.registry.open("r", route="generate", key="", started=now, deadline=now + 9) as live:
            manager.queues[live.handle] = OutputQueue(Spool(Path("unused")))
            live.drawn_before = journal
            manager.begin(live, NewRequest(handle=live.handle, request_id="r", params={}, outputs=[], inputs={}), "")
            assert sent[0].resume == Resume(attempt=2, ids={"LLM": [5, 6]})
            manager.drawn(Drawn(handle=live.handle, place="LLM", start=1, ids=[6, 7]))
            assert live.record is not None and live.record.journal.ids() == {"LLM": [5, 6, 7]}
            del manager.queues[live.handle]


def test_a_journal_grows_only_and_drops_ids_behind_a_gap() -> None:
    journal = Journal()
    for start, ids in ((0, [1, 2]), (0, [9, 9]), (1, [8, 3]), (4, [7]), (3, [4])):
        journal.add(Drawn(handle=1, place="p", start=start, ids=ids))
    assert journal.ids() == {"p": [1, 2, 3, 4]}


def test_a_journal_beyond_its_limit_keeps_nothing() -> None:
    journal = Journal()
    journal.add(Drawn(handle=1, place="p", start=0, ids=[1, 2]), limit_bytes=8)
    assert journal.size_bytes == 8 and not journal.is_full
    journal.add(Drawn(handle=1, place="q", start=0, ids=[3]), limit_bytes=8)
    journal.add(Drawn(handle=1, place="p", start=2, ids=[3]), limit_bytes=8)
    assert journal.is_full and not journal.ids()


async def test_the_newest_state_of_each_loop_goes_into_the_next_attempt(started: Started) -> None:
    """Each state is copied out of the worker's memory, which is free again at once, and lent to the next attempt."""
    latents = np.arange(1 << 18, dtype=np.float32)
    halves = np.array([0x3F80, 0x7FC1, 0x8000], np.uint16)
    async with started() as api:
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        first = await api.fake.next_request()
        api.fake.save(first.handle, "LLM:4/denoise", 4, latents=latents)
        api.fake.save(first.handle, "LLM:5/denoise", 8, dtype="bfloat16", latents=halves)
        api.fake.save(first.handle, "LLM:4/denoise", 8, latents=latents[::-1].copy())
        api.fake.audio_of(first.handle, SAMPLES[:100])
        await api.until(lambda: api.fake.live_loans == 0)
        api.fake.lose(first.handle)
        second = await api.fake.next_request(2)
        assert second.resume is not None
        saved = second.resume.saved
        assert {place: state.iteration for place, state in saved.items()} == {"LLM:5/denoise": 8, "LLM:4/denoise": 8}
        kept = saved["LLM:4/denoise"].values["latents"]
        assert isinstance(kept, ShmTensor) and kept.shape == latents.shape
        assert np.array_equal(api.fake.read(kept), latents[::-1])
        kept = saved["LLM:5/denoise"].values["latents"]
        assert isinstance(kept, InlineTensor) and (kept.dtype, kept.data) == ("bfloat16", halves.tobytes())
        lent = api.process.link.loans
        api.fake.lose(second.handle, "elsewhere", is_excused=True)
        second = await api.fake.next_request(3)
        assert api.process.link.loans == lent, "the states of the attempt before are free again"
        assert second.resume is not None and second.resume.saved.keys() == saved.keys()
        api.fake.save(first.handle, "LLM:4/denoise", 12, latents=latents)  # of the old attempt, too late
        api.fake.save(second.handle, "LLM:5/denoise", 12, latents=latents)
        api.fake.audio_of(second.handle, SAMPLES[:200])
        await api.until(lambda: api.fake.live_loans == 0)
        (live,) = api.process.registry
        assert live.record is not None
        places = live.record.saved.places
        assert {place: state.iteration for place, state in places.items()} == {"LLM:4/denoise": 8, "LLM:5/denoise": 12}
        api.fake.finish(second.handle)
        assert (await task).status_code == 200
        await api.clean()


def state_of(size_bytes: int) -> SavedLoop:
    value = InlineTensor(dtype="uint8", shape=(size_bytes,), data=bytes(size_bytes))
    return SavedLoop(iteration=4, values={"x": value})


def test_states_beyond_the_limit_of_a_request_drop_the_oldest_places() -> None:
    saved = SavedLoops()
    for place in ("a", "b", "a", "c"):
        saved.keep(place, state_of(4), limit_bytes=8)
    assert list(saved.places) == ["a", "c"] and saved.size_bytes == 8
    saved.keep("d", state_of(9), limit_bytes=8)
    assert not saved.places


async def test_a_request_whose_journal_is_full_says_so(started: Started) -> None:
    async with started() as api:
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        first = await api.fake.next_request()
        await api.until(lambda: all(live.record is not None for live in api.process.registry))
        for live in api.process.registry:
            assert live.record is not None
            live.record.journal.is_full = True
        api.fake.lose(first.handle)
        answer: httpx.Response = await task
        assert answer.status_code == 503 and "journal" in answer.json()["error"]["message"]
