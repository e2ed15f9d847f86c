"""Messages that are lost, duplicated, late or out of order, clock jumps, reused ids: one correct end each."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Api, Started
from tests.fakes.conductor import FakeDeployment, speak

FORM = {"text": "x", "output_modalities": "audio", "stream_events": "full"}
CHUNKS = 5
MANY = 60
Note = Callable[[str, object], None]


def wanted(handle_value: int) -> bytes:
    """Return the audio of a request whose chunks start with this value."""
    return b"".join((handle_value + n).to_bytes(2, "little") * 64 for n in range(CHUNKS))


def value_of(request: NewRequest) -> int:
    """Return a value that no other request of the test has."""
    return 10 * int(request.request_id.partition("-")[2])


def chunk(fake: FakeDeployment, request: NewRequest, number: int) -> None:
    fake.audio(request.handle, 64, value=value_of(request) + number, seq=number)


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines() if line]


def sound_of(answer: httpx.Response) -> bytes:
    return b"".join(base64.b64decode(line["data"]) for line in lines_of(answer) if line.get("modality") == "audio")


def code_of(answer: httpx.Response) -> str:
    """Return the code of the error that ends a response, or that is the response."""
    last = lines_of(answer)[-1]
    return str((last["metadata"] if answer.status_code == 200 else last["error"])["code"])


async def send(api: Api, number: int, **fields: str) -> httpx.Response:
    return await api.client.post("/generate", data={**FORM, "request_id": f"r-{number}", **fields})


async def clean(api: Api) -> None:
    await api.until(lambda: api.service_is_clean)
    await api.fake.until(lambda: api.fake.live_loans == 0)


async def test_doubled_late_and_reordered_messages_change_no_answer(started: Started, record_property: Note) -> None:
    order = random.Random(7)

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        moves: list[Callable[[], None]] = [
            lambda number=number: chunk(fake, request, number)  # type: ignore[misc]
            for number in range(CHUNKS)
            for _ in range(order.choice((1, 1, 2)))
        ]
        moves += [lambda: fake.finish(request.handle, emitted=CHUNKS)] * order.choice((1, 2))
        order.shuffle(moves)
        for move in moves:
            move()
        for number in range(CHUNKS):
            chunk(fake, request, number)  # after the end

    async with started(script, max_concurrent_requests=MANY) as api:
        answers = await asyncio.gather(*(send(api, number) for number in range(1, MANY + 1)))
        for number, answer in enumerate(answers, start=1):
            assert [line["modality"] for line in lines_of(answer)] == ["start", *["audio"] * CHUNKS, "done"]
            assert sound_of(answer) == wanted(10 * number)
        await clean(api)
        assert not api.fake.cancels
    record_property("requests_with_doubled_messages", MANY)


async def test_a_lost_message_ends_its_request_by_the_deadline_and_no_other(
    started: Started, record_property: Note
) -> None:
    most_at_once = 0

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        nonlocal most_at_once
        most_at_once = max(most_at_once, len(fake.requests) - len(fake.cancels))
        number = value_of(request) // 10
        lost = number % (CHUNKS + 2)  # each chunk in turn, the end, and none
        for index in range(CHUNKS):
            if index != lost:
                chunk(fake, request, index)
        if lost != CHUNKS:
            fake.finish(request.handle, emitted=CHUNKS)

    async with started(script, max_concurrent_requests=MANY) as api:
        whole = {number for number in range(1, MANY + 1) if number % (CHUNKS + 2) == CHUNKS + 1}
        answers = await asyncio.gather(
            *(send(api, n, timeout_s="300" if n in whole else "1.5") for n in range(1, MANY + 1))
        )
        assert most_at_once > len(whole) + 1, "requests that wait for a lost message wait side by side"
        for number, answer in enumerate(answers, start=1):
            if number in whole:
                assert lines_of(answer)[-1]["modality"] == "done" and sound_of(answer) == wanted(10 * number)
            else:
                assert code_of(answer) == "timeout", "never taken for whole"
                assert wanted(10 * number).startswith(sound_of(answer)), "nothing after a gap"
        await clean(api)
    record_property("requests_with_a_lost_message", MANY - len(whole))


async def test_an_id_that_comes_again_never_meets_words_of_its_former_life(started: Started) -> None:
    handles: list[int] = []

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        for old in handles[-3:]:  # messages that an earlier request with this name may still receive
            fake.audio(old, 64, value=9999, seq=CHUNKS)
            fake.finish(old, emitted=CHUNKS)
            fake.fail(old)
        handles.append(request.handle)
        for number in range(CHUNKS):
            chunk(fake, request, number)
        fake.finish(request.handle, emitted=CHUNKS)

    async with started(script) as api:
        for _ in range(40):
            assert sound_of(await send(api, 3)) == wanted(30)
        assert len(set(handles)) == 40
        await clean(api)


async def test_a_cancel_at_any_moment_is_one_outcome_and_leaves_nothing(
    started: Started, record_property: Note
) -> None:
    moments, count, turns = random.Random(11), 150, asyncio.Semaphore(10)

    async def one(api: Api, number: int) -> str:
        async with turns:
            return await cancelled(api, number)

    async def cancelled(api: Api, number: int) -> str:
        running = asyncio.create_task(send(api, number))
        await asyncio.sleep(moments.random() * 0.03)
        told = await api.client.post(f"/v1/requests/r-{number}/cancel")
        answer = await running
        if answer.status_code == 499:
            return "cancelled"
        last = lines_of(answer)[-1]
        assert told.status_code in (200, 404)  # unknown: it arrived before its request
        assert last["modality"] == "done" or last["metadata"]["code"] == "cancelled"
        return "finished" if last["modality"] == "done" else "cancelled"

    async with started(speak(3), max_concurrent_requests=4, max_queue=400) as api:
        outcomes = Counter(await asyncio.gather(*(one(api, number) for number in range(1, count + 1))))
        await clean(api)
        assert outcomes.total() == count and outcomes["cancelled"]
        told = Counter(cancel.handle for cancel in api.fake.cancels)
        assert set(told.values()) <= {1}, "the conductor hears of each at most once"
        assert sound_of(await send(api, 1))
        await clean(api)
    record_property("cancels", count)


async def test_a_clock_that_jumps_moves_no_deadline(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    true = time.time

    async with started() as api:
        begun = time.monotonic()
        late = asyncio.create_task(send(api, 2, timeout_s="1"))
        whole = asyncio.create_task(send(api, 1, timeout_s="300"))
        await api.fake.until(lambda: "r-1" in {request.request_id for request in api.fake.requests})
        requests = {request.request_id: request for request in api.fake.requests}
        for number, jump_s in enumerate((3600, -3600, 7200, -7200, 0)):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: true() + jump_s)
            chunk(api.fake, requests["r-1"], number)
            await asyncio.sleep(0.02)
        api.fake.finish(requests["r-1"].handle, emitted=CHUNKS)
        assert sound_of(await whole) == wanted(10)
        assert code_of(await late) == "timeout"
        assert time.monotonic() - begun >= 1, "not before its time"
        await clean(api)


async def test_an_idle_connection_stays_open_for_longer_than_clients_keep_it(started: Started) -> None:
    async with started(speak(1)) as api:
        for _ in range(20):
            assert (await send(api, 1)).status_code == 200
        (connection,) = api.process._listener.connections
        assert connection.app.config.KEEP_ALIVE_TIMEOUT > 75  # the longest idle time of common clients and proxies
