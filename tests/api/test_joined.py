"""Requests in parts: several run side by side, and their outputs are one answer, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pybase64
import pytest

from mstar_core.api.admission import AdmissionQueue, Place
from mstar_core.errors import Overloaded
from mstar_core.messages.requests import CancelRequest, NewRequest
from tests.api.conftest import Api, Started
from tests.fakes.conductor import FakeDeployment
from tests.fakes.divided_model import SPEC

TEXT = " one| two| three| four"
WHOLE = "one two three four"


def say(fake: FakeDeployment, request: NewRequest) -> None:
    """Answer a request with its prompt."""
    ids = np.frombuffer(fake.prompt(request).encode(), dtype=np.uint8).astype(np.int64)
    fake.output(request.handle, "text", ids, port="token", finishes=True)


def ask(api: Api, text: str = TEXT, *, at_once: int = 8, **fields: Any) -> asyncio.Task[httpx.Response]:
    data = {"text": text, "at_once": str(at_once), "streaming": "false", **fields}
    return asyncio.create_task(api.client.post("/generate", data=data))


async def arrived(api: Api, count: int) -> list[NewRequest]:
    """Wait for so many requests, and return them by part."""
    await api.fake.until(lambda: len(api.fake.requests) >= count)
    return sorted(api.fake.requests, key=lambda request: request.facts["part"])


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return "".join(pybase64.b64decode(each["data"]).decode() for each in answer.json()["outputs"]["text"])


async def test_parts_run_side_by_side_and_join_in_order(started: Started) -> None:
    async with started(model=SPEC) as api:
        asked = ask(api)
        parts = await arrived(api, 4)
        assert [api.fake.prompt(part) for part in parts] == TEXT.split("|"), "all run before the first has an answer"
        for part in reversed(parts):
            say(api.fake, part)
        answer = await asked
        assert text_of(answer) == WHOLE
        usage = answer.json()["usage"]
        assert usage["bars"] == 3 and usage["completion_tokens"] == len(TEXT) - 3
        await api.clean()


async def test_a_stream_has_no_part_before_its_turn(started: Started) -> None:
    async with started(model=SPEC) as api:
        asked = ask(api, streaming="true")
        parts = await arrived(api, 4)
        for place in (2, 1, 3, 0):
            say(api.fake, parts[place])
        lines = [json.loads(line) for line in (await asked).text.splitlines()]
        data = [pybase64.b64decode(line["data"]).decode() for line in lines if line.get("modality") == "text"]
        assert "".join(data) == WHOLE
        await api.clean()


async def test_no_more_parts_run_than_are_asked_for_or_have_a_place(started: Started) -> None:
    for at_once, places in ((2, 8), (8, 2)):
        most = 0

        def answer(fake: FakeDeployment, request: NewRequest) -> None:
            nonlocal most
            most = max(most, len(api.process.registry))
            say(fake, request)

        async with started(answer, model=SPEC, max_concurrent_requests=places, max_queue=0) as api:
            assert text_of(await ask(api, at_once=at_once)) == WHOLE
            assert len(api.fake.requests) == 4 and most <= 2
            await api.clean()


async def test_parts_whose_place_is_taken_while_their_body_is_read_are_refused(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def taken(queue: AdmissionQueue, key: str = "") -> Iterator[Place]:
        raise Overloaded("the queue is full")
        yield

    async with started(model=SPEC) as api:
        monkeypatch.setattr(AdmissionQueue, "place", taken)  # behind the check that comes before the body
        async with asyncio.timeout(60):
            refused = await ask(api)
        assert refused.status_code == 429 and not api.fake.requests


async def test_one_at_once_is_one_request(started: Started) -> None:
    async with started(say, model=SPEC) as api:
        assert text_of(await ask(api, at_once=1)) == TEXT[1:]
        assert text_of(await ask(api, " alone")) == "alone", "a prompt without parts"
        assert len(api.fake.requests) == 2


@pytest.mark.parametrize("how", ["failure", "cancel"])
async def test_the_end_of_one_part_ends_all(started: Started, how: str) -> None:
    async with started(model=SPEC, resume=False) as api:
        asked = ask(api, request_id="mine")
        parts = await arrived(api, 4)
        if how == "failure":
            api.fake.lose(parts[2].handle)
        else:
            say(api.fake, parts[1])
            assert (await api.client.post("/v1/requests/mine/cancel")).status_code < 300
        assert (await asked).status_code >= 400
        await api.clean()
        ended = {parts[0].handle, parts[3].handle}
        await api.fake.until(lambda: ended <= {message.handle for message in api.fake.of(CancelRequest)})


async def test_errors_of_processing_come_before_the_answer(started: Started) -> None:
    async with started(model=SPEC) as api:
        refused = await ask(api, "x" * 1001, streaming="true")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "text"
        await api.clean()
