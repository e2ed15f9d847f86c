"""Events that are kept for clients that reconnect: numbers, limits, keys, errors, and requests without a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mstar_core.api.errors import EventsGone
from mstar_core.api.output import kept_events
from mstar_core.api.output.kept_events import EVENTS, OVERHEAD_BYTES, EventLog, KeptEvents
from mstar_core.errors import Duplicate, RequestError
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import LIMIT_S, LIMITS, Api, Started
from tests.fakes.any_model import SPEC as ANY
from tests.fakes.conductor import FakeDeployment, begin, echo, say, speak
from tests.fakes.talk_model import SPEC as CHAT

DETACH = {"X-Mstar-Detach": "true"}
TALK = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


def kept(store: KeptEvents, request_id: str, key: str = "") -> EventLog:
    """A log of a running request."""
    log = EventLog()
    store.open(request_id, key, log, EVENTS)
    return log


async def after(log: EventLog, number: int) -> list[bytes]:
    """The events of an ended log behind a number."""
    return [event async for ready in log.since(number, 1.0) for event in ready]


# the log


async def test_events_are_numbered_from_one_and_sent_events_say_their_number() -> None:
    log = kept(KeptEvents(), "r")
    assert b"".join(log.add([(b"data: a\n\n",), (b"data: b\n\n",)])) == b"id: 1\ndata: a\n\nid: 2\ndata: b\n\n"
    log.end()
    assert await after(log, 1) == [b"id: 2\ndata: b\n\n"]
    assert await after(log, 2) == []


async def test_events_that_are_not_kept_have_a_data_field_alone() -> None:
    log = EventLog()
    assert log.add([(b"data: a\n\n",)]) == [b"data: a\n\n"]
    assert (log.count, log.size_bytes) == (1, 0)


async def test_a_reader_goes_on_live_and_ends_with_the_request() -> None:
    log, seen = kept(KeptEvents(), "r"), list[int]()

    async def read() -> None:
        async for ready in log.since(0, 60.0):
            seen.append(len(ready))

    reading = asyncio.create_task(read())
    for count in (1, 3):
        log.add([(b"data: x\n\n",)] * count)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    log.end()
    await asyncio.wait_for(reading, LIMIT_S)
    assert sum(seen) == 4


async def test_the_oldest_events_go_first_and_the_error_names_the_first_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_events, "LOG_BYTES", 10 * (OVERHEAD_BYTES + 20))
    log = kept(KeptEvents(), "r")
    for _ in range(25):
        log.add([(b"data: 0123\n\n",)])
    with pytest.raises(EventsGone, match="before number 1[5-9]") as caught:
        log.check(0)
    first = int(caught.value.title.split()[3])
    assert f"after={first - 1}" in caught.value.hint
    log.end()
    assert len(await after(log, first - 1)) == 26 - first
    assert log.size_bytes <= kept_events.LOG_BYTES


async def test_the_total_limit_drops_ended_requests_before_events_of_running_ones() -> None:
    store = KeptEvents(total_bytes=10 * (OVERHEAD_BYTES + 100))
    ended, running = kept(store, "ended"), kept(store, "running")
    ended.add([(b"x" * 80,)] * 6)
    ended.end()
    running.add([(b"x" * 80,)] * 6)
    assert store.find("ended", "") is None and store.find("running", "") is running
    running.check(0)
    running.add([(b"x" * 80,)] * 20)
    assert store.size_bytes == running.size_bytes <= 10 * (OVERHEAD_BYTES + 100)
    with pytest.raises(EventsGone):
        running.check(0)


async def test_ended_events_are_dropped_after_a_while() -> None:
    store = KeptEvents(keep_s=0.02)
    log = kept(store, "r")
    log.add([(b"data: a\n\n",)])
    log.end()
    assert store.find("r", "") is log
    await asyncio.sleep(0.1)
    assert store.find("r", "") is None and store.size_bytes == 0


async def test_an_id_can_be_used_again_after_its_request_ended() -> None:
    store = KeptEvents()
    first = kept(store, "r")
    with pytest.raises(Duplicate):
        kept(store, "r")
    first.end()
    assert store.find("r", "") is first
    second = kept(store, "r")
    assert store.find("r", "") is second
    store.forget("other", "")


async def test_a_replay_is_not_kept_and_the_numbers_go_on_where_the_client_is() -> None:
    log = kept(KeptEvents(), "r")
    log.add([(b"data: a b\n\n",)], is_replay=True)
    log.restart(7)
    assert log.add([(b"data: c\n\n",)]) == [b"id: 8\n", b"data: c\n\n"]
    log.check(7)
    with pytest.raises(EventsGone, match="before number 8"):
        log.check(6)


async def test_a_number_behind_the_end_is_an_error() -> None:
    log = kept(KeptEvents(), "r")
    log.check(5)  # it may still come
    log.end()
    with pytest.raises(RequestError, match="ended with event 0"):
        log.check(5)


# the route


@asynccontextmanager
async def left(api: Api, request_id: str, least: int = 1, **what: Any) -> AsyncIterator[bytes]:
    """A request whose client closes its connection after some lines or events. Yields the bytes that it has read.

    They are empty if the deadline of the request passed before its response began.
    """
    headers = {"X-Request-ID": request_id, **DETACH, **what.pop("headers", {})}
    data, end = b"", b"\n" if what.get("url", "/generate") == "/generate" else b"\n\n"
    async with api.client.stream("POST", **{"url": "/generate", **what}, headers=headers) as answer:
        assert answer.status_code in (200, 504)
        if answer.status_code == 200:
            async for piece in answer.aiter_raw():
                data += piece
                if data.count(end) >= least:
                    break
    yield data[: len(data) - len(data.rpartition(end)[2])]


async def events(api: Api, request_id: str, number: int | None = 0, **what: Any) -> httpx.Response:
    """The response of the route."""
    query = "" if number is None else f"?after={number}"
    return await api.client.get(f"/v1/requests/{request_id}/events{query}", **what)


async def test_a_client_that_comes_back_gets_the_rest_and_nothing_twice(started: Started) -> None:
    async with started(begin) as api:
        async with left(api, "r", data={"text": "hi", "output_modalities": "audio", "stream_events": "full"}) as data:
            got = data.count(b"\n")
            request = await api.fake.next_request(1)
            rest = asyncio.create_task(events(api, "r", got))
            for value in (2, 3):
                api.fake.audio(request.handle, value=value)
            api.fake.finish(request.handle)
            answer = await rest
        assert answer.headers["content-type"] == "application/x-ndjson; charset=utf-8"
        whole = [json.loads(line) for line in (data + answer.content).splitlines()]
        assert [line["modality"] for line in whole] == ["start", "audio", "audio", "audio", "done"]
        assert [line["metadata"]["offset_samples"] for line in whole[1:4]] == [0, 2048, 4096]
        assert (await events(api, "r")).content == data + answer.content
        assert not api.fake.cancels
        assert (await api.client.get("/v1/requests/r")).json()["status"] == "finished"
        await api.clean()


async def test_server_sent_events_have_ids_and_last_event_id_works_as_after(started: Started) -> None:
    async with started(say(b"one", b"two"), model=CHAT) as api:
        whole = await api.client.post("/v1/chat/completions", json=TALK, headers={"X-Request-ID": "c", **DETACH})
        parts = whole.content.split(b"\n\n")[:-1]
        assert [part.split(b"\n")[0] for part in parts] == [b"id: %d" % number for number in range(1, len(parts) + 1)]
        assert parts[-1].endswith(b"data: [DONE]")
        again = await events(api, "c", None, headers={"Last-Event-ID": "2"})
        assert again.headers["content-type"] == EVENTS
        assert again.content == b"".join(part + b"\n\n" for part in parts[2:])
        plain = await api.client.post("/v1/chat/completions", json=TALK)
        assert b"id: " not in plain.content.replace(b'"id":', b"")


async def test_frames_are_events_too(started: Started) -> None:
    async with started(echo, model=ANY) as api:
        headers = {"X-Request-ID": "f", "Accept": "application/x-mstar-frames", **DETACH}
        whole = await api.client.post("/generate", data={"text": "hi"}, headers=headers)
        again = await events(api, "f")
        assert again.content == whole.content and again.headers["content-type"] == whole.headers["content-type"]


async def test_without_the_header_a_closed_connection_still_cancels(started: Started) -> None:
    async with started(begin) as api:
        for number, value in enumerate(("", "false"), start=1):
            headers = {"X-Request-ID": "r"} | ({"X-Mstar-Detach": value} if value else {})
            async with api.client.stream(
                "POST", "/generate", data={"text": "hi", "output_modalities": "audio"}, headers=headers
            ) as answer:
                await anext(answer.aiter_raw())
            await api.fake.until(lambda count=number: len(api.fake.cancels) == count)  # type: ignore[misc]
            answer = await events(api, "r")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
            assert "X-Mstar-Detach" in answer.json()["error"]["message"]
        await api.clean()


async def test_a_client_that_leaves_before_its_response_began_finds_it_later(started: Started) -> None:
    async with started() as api:
        _, writer = await asyncio.open_connection("127.0.0.1", api.process.port)
        form = {"text": "hi", "output_modalities": "audio"}
        request = api.client.build_request("POST", "/generate", data=form, headers={"X-Request-ID": "r", **DETACH})
        head = [f"{name}: {value}".encode() for name, value in request.headers.items()]
        writer.write(b"\r\n".join([b"POST /generate HTTP/1.1", *head, b"", b""]) + request.content)
        (running,) = [await api.fake.next_request(1)]
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)
        api.fake.audio(running.handle)
        api.fake.finish(running.handle)
        answer = await events(api, "r")
        assert [json.loads(line)["modality"] for line in answer.content.splitlines()] == ["audio"]
        assert not api.fake.cancels
        await api.clean()


async def test_a_failure_without_a_client_is_its_last_event(started: Started) -> None:
    def fail(fake: FakeDeployment, request: NewRequest) -> None:
        fake.fail(request.handle)

    async with started(fail) as api:
        form = {"text": "hi", "output_modalities": "audio"}
        answer = await api.client.post("/generate", data=form, headers={"X-Request-ID": "r", **DETACH})
        assert answer.status_code == 500
        (line,) = (await events(api, "r")).content.splitlines()
        assert json.loads(line)["metadata"]["code"] == "engine_error"


@pytest.mark.parametrize("how", ["by id", "deadline"])
async def test_a_request_without_a_client_ends_by_id_and_at_its_deadline(how: str, started: Started) -> None:
    async with started(begin) as api:
        for limit in (60.0,) if how == "by id" else LIMITS:
            form = {"text": "hi", "output_modalities": "audio", "timeout_s": str(limit)}
            async with left(api, "r", data=form) as data:
                if how == "by id":
                    assert (await api.client.post("/v1/requests/r/cancel")).json()["status"] == "cancelled"
                answer = await events(api, "r", data.count(b"\n"))
            if data:
                break
        (line,) = answer.content.splitlines()
        assert json.loads(line)["metadata"]["code"] == ("cancelled" if how == "by id" else "timeout")
        await api.fake.until(lambda: bool(api.fake.cancels))
        assert {cancel.why for cancel in api.fake.cancels} == {"by_id" if how == "by id" else "deadline"}
        await api.clean()


async def test_events_belong_to_the_key_that_sent_the_request(started: Started) -> None:
    async with started(speak(1), api_keys=("one", "two")) as api:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two", "three")]
        form = {"text": "hi", "output_modalities": "audio"}
        await api.client.post("/generate", data=form, headers={"X-Request-ID": "r", **DETACH, **keys[0]})
        answers = [await events(api, "r", headers=headers) for headers in keys]
        assert [answer.status_code for answer in answers] == [200, 404, 401]
        assert answers[1].json() == (await events(api, "unknown", headers=keys[1])).json()


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "9" * 30, "٣"])
async def test_a_number_that_is_none_is_refused(number: str, started: Started) -> None:
    async with started(speak(1)) as api:
        form = {"text": "hi", "output_modalities": "audio"}
        await api.client.post("/generate", data=form, headers={"X-Request-ID": "r", **DETACH})
        answer = await api.client.get("/v1/requests/r/events", params={"after": number})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_dropped_events_are_410(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_events, "LOG_BYTES", 12_000)
    async with started(speak(5)) as api:
        form = {"text": "hi", "output_modalities": "audio"}
        await api.client.post("/generate", data=form, headers={"X-Request-ID": "r", **DETACH})
        answer = await events(api, "r", 1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "events_gone")
        assert "after=3" in answer.json()["error"]["message"]
        assert len((await events(api, "r", 3)).content.splitlines()) == 2


@pytest.mark.parametrize(
    "url, body",
    [
        ("/generate", {"text": "hi", "output_modalities": "audio", "streaming": False}),
        ("/v1/audio/speech", {"input": "x"}),
    ],
)
async def test_responses_that_are_not_events_cannot_be_detached(url: str, body: Any, started: Started) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.post(url, json=body, headers=DETACH)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Mstar-Detach")
        odd = await api.client.post(url, json=body, headers={"X-Mstar-Detach": "perhaps"})
        assert odd.status_code == 400
        assert not api.fake.requests


async def test_a_drain_waits_for_a_request_without_a_client(started: Started) -> None:
    async with started(begin) as api:
        async with left(api, "r", data={"text": "hi", "output_modalities": "audio"}):
            pass
        await asyncio.sleep(0.05)
        assert api.process.link.running() == 1
        (request,) = api.fake.requests
        api.fake.finish(request.handle)
        await api.clean()
        assert api.process.link.running() == 0


async def test_a_client_that_does_not_read_is_cut_and_its_request_goes_on(started: Started) -> None:
    async with started(begin, stall_timeout_s=0.3) as api:
        form = {"text": "hi", "output_modalities": "audio"}
        async with api.client.stream("POST", "/generate", data=form, headers={"X-Request-ID": "r", **DETACH}) as answer:
            assert answer.status_code == 200
            (request,) = api.fake.requests
            for _ in range(60):
                api.fake.audio(request.handle, 200_000)
            api.fake.finish(request.handle)
            await api.clean()
        assert (await api.client.get("/v1/requests/r")).json()["status"] == "finished"
        assert not api.fake.cancels
        gone = await events(api, "r")
        assert gone.status_code == 410, "32 MB were made, of which 16 MiB are kept"
