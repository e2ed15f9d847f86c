"""Requests that fail while they run: cancelled, cut, late, failed, orphaned, or not read."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from mstar_core.messages.life import PeerDown, ServiceState, Stop
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import LIMITS, Api, Started, running
from tests.fakes.conductor import FakeDeployment, begin, speak

GOOD = {"text": "x", "output_modalities": "audio", "request_id": "r"}
SPEECH = {"input": "x", "stream": True, "response_format": "pcm"}


async def first_line(stream: Any) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(await anext(stream))
    return line


async def begun(api: Api, stream: Any) -> NewRequest:
    """Read the first chunk, which `begin` sent."""
    request = await api.fake.next_request()
    assert (await first_line(stream))["modality"] == "audio"
    return request


async def rest_of(stream: Any) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in stream if line]


async def clean(api: Api) -> None:
    """Wait until no request holds anything."""
    await api.until(lambda: api.service_is_clean)


async def test_a_failure_in_mid_stream_is_one_error_line_and_then_the_end(started: Started) -> None:
    async with started(begin) as api, api.client.stream("POST", "/generate", data=GOOD) as answer:
        stream = answer.aiter_lines()
        request = await begun(api, stream)
        api.fake.fail(request.handle, "engine_error", 500, "node LLM failed")
        await clean(api)  # later messages come from other processes, on their own sockets
        api.fake.audio(request.handle)
        api.fake.finish(request.handle)
        (last,) = await rest_of(stream)
        assert last["modality"] == "error"
        assert last["metadata"] == {
            "status": 500,
            "code": "engine_error",
            "type": "server_error",
            "param": None,
            "request_id": "r",
        }
        await clean(api)
        state = (await api.client.get("/v1/requests/r")).json()
        assert (state["status"], state["error"]["code"]) == ("failed", "engine_error")
        assert "Traceback" not in json.dumps(state)
        assert not api.fake.cancels


async def test_cancel_by_id_in_mid_stream(started: Started) -> None:
    async with started(begin) as api, api.client.stream("POST", "/generate", data=GOOD) as answer:
        stream = answer.aiter_lines()
        request = await begun(api, stream)
        assert (await api.client.get("/v1/requests/r")).json()["status"] == "running"
        told = await api.client.post("/v1/requests/r/cancel")
        assert told.json() == {"id": "r", "status": "cancelled"}
        (last,) = await rest_of(stream)
        assert (last["metadata"]["status"], last["metadata"]["code"]) == (499, "cancelled")
        await api.fake.until(lambda: [(c.handle, c.why) for c in api.fake.cancels] == [(request.handle, "by_id")])
        await clean(api)
        again = await api.client.post("/v1/requests/r/cancel")
        assert again.json() == {"id": "r", "status": "cancelled"}


async def test_cancel_by_id_while_it_waits_for_its_turn(started: Started) -> None:
    async with started(max_concurrent_requests=1) as api:
        blocker = asyncio.create_task(api.client.post("/generate", data={**GOOD, "request_id": "first"}))
        request = await api.fake.next_request()
        waiter = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.until(lambda: [live.state for live in api.process.registry] == ["running", "queued"])
        await api.client.post("/v1/requests/r/cancel")
        assert (await waiter).status_code == 499
        assert len(api.fake.requests) == 1 and not api.fake.cancels
        speak(1)(api.fake, request)
        assert (await blocker).status_code == 200
        assert (await api.client.post("/v1/requests/first/cancel")).json()["status"] == "finished"
        await api.clean()


async def test_a_deadline_in_mid_stream_is_an_error_line(started: Started) -> None:
    async with started(begin) as api:
        for limit in LIMITS:
            answer = await api.client.post("/generate", data={**GOOD, "timeout_s": str(limit)})
            if answer.status_code == 200:
                break
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            await clean(api)
        first, last = [json.loads(line) for line in answer.text.splitlines()]
        assert (first["modality"], last["modality"]) == ("audio", "error")
        assert (last["metadata"]["status"], last["metadata"]["code"]) == (504, "timeout")
        await api.fake.until(lambda: bool(api.fake.cancels) and {c.why for c in api.fake.cancels} == {"deadline"})


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"data": GOOD}),
    ("/generate", {"data": {**GOOD, "streaming": "false"}}),
    ("/v1/audio/speech", {"json": SPEECH}),
    ("/v1/audio/speech", {"json": {"input": "x"}}),
    ("/v1/audio/speech", {"json": {"input": "x", "stream_format": "sse"}}),
]


async def test_a_closed_connection_cancels_on_every_route() -> None:
    async with running() as api:
        for count, (path, body) in enumerate(ROUTES, start=1):
            task = asyncio.create_task(api.client.post(path, **body))
            request = await api.fake.next_request(count)
            api.fake.audio(request.handle)
            task.cancel()
            told = [(item.handle, "disconnect") for item in api.fake.requests]
            await api.fake.until(lambda told=told: [(c.handle, c.why) for c in api.fake.cancels] == told)  # type: ignore[misc]
            await clean(api)
            api.fake.audio(request.handle, 100_000)  # too late: dropped, and its memory released
            await api.fake.until(lambda: api.fake.live_loans == 0)


async def test_a_connection_closed_in_the_queue_gives_its_place_back(started: Started) -> None:
    async with started(max_concurrent_requests=1, max_queue=1) as api:
        blocker = asyncio.create_task(api.client.post("/generate", data={**GOOD, "request_id": "first"}))
        request = await api.fake.next_request()
        waiter = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.until(lambda: len(api.process.registry) == 2)
        waiter.cancel()
        await api.until(lambda: len(api.process.registry) == 1)
        api.fake.script = speak(1)
        speak(1)(api.fake, request)
        assert (await blocker).status_code == 200
        assert (await api.client.post("/generate", data=GOOD)).status_code == 200
        assert len(api.fake.requests) == 2


SECRET_CAUSE = """conductor hung and was killed by SIGKILL (resident memory 120 MiB; last log line: File "x", line 1)"""


async def test_without_resumption_the_death_of_the_conductor_fails_every_open_request_and_refuses_new_ones(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(resume=False) as api:
        whole = asyncio.create_task(api.client.post("/generate", data={**GOOD, "request_id": "w", "stream": "0"}))
        await api.fake.next_request()
        api.fake.script = begin
        async with api.client.stream("POST", "/generate", data=GOOD) as answer:
            stream = answer.aiter_lines()
            await first_line(stream)
            api.fake.down("conductor", SECRET_CAUSE, "the conductor died")
            (last,) = await rest_of(stream)
            assert last["metadata"]["code"] == "worker_lost"
            assert last["metadata"]["status"] == 503
        dead = await whole
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "worker_lost")
        why = "the request cannot be resumed: the deployment does not resume requests"
        assert dead.json()["error"]["message"] == f"the conductor died, and {why}; send the request again"
        refused = await api.client.post("/generate", data=GOOD)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_lost")
        assert int(refused.headers["retry-after"]) >= 1
        counted = (await api.client.get("/metrics")).text
        assert 'mstar_rejected_total{code="worker_lost"} 1.0' in counted, "the two that were open have failed"
        health = await api.client.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "the conductor died")
        ready = await api.client.get("/ready")
        assert ready.status_code == 503
        for answer in (dead, refused, health, ready):
            assert "MiB" not in answer.text and "last log line" not in answer.text and "File" not in answer.text
        lines = [record for record in caplog.records if "is gone" in record.getMessage()]
        assert [(line.levelname, sorted(line.facts["requests"])) for line in lines] == [("ERROR", ["r", "w"])]  # type: ignore[attr-defined]
        api.fake.tell(api.fake.up("conductor", 1), ServiceState(state="ready"))
        await api.ready()
        await clean(api)


async def test_outputs_of_a_dead_worker_that_arrived_are_a_whole_answer(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstar_core.api.output.queue.LOST_GRACE_S", 30.0)  # a thread may stall longer than usual
    async with started() as api:
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        request = await api.fake.next_request()
        api.fake.finish(request.handle, emitted=2)
        api.fake.down("worker-0", "killed by signal 9")
        api.fake.audio(request.handle)
        api.fake.audio(request.handle)
        answer = await task
        assert [json.loads(line)["modality"] for line in answer.text.splitlines()] == ["audio", "audio"]


async def test_without_resumption_outputs_that_died_with_their_worker_fail_the_request(started: Started) -> None:
    async with started(begin, resume=False) as api:
        async with api.client.stream("POST", "/generate", data=GOOD) as answer:
            stream = answer.aiter_lines()
            request = await begun(api, stream)
            api.fake.finish(request.handle, emitted=2)
            api.fake.tell(PeerDown(name="worker-0", incarnation=0, cause="killed by signal 9"))
            (last,) = await rest_of(stream)
        assert (last["modality"], last["metadata"]["code"]) == ("error", "worker_lost")


async def test_a_stream_of_sound_that_fails_is_cut_and_never_looks_whole(started: Started) -> None:
    async with started(begin) as api:
        with pytest.raises(httpx.RemoteProtocolError):
            async with api.client.stream(
                "POST", "/v1/audio/speech", json=SPEECH, headers={"X-Request-ID": "s"}
            ) as answer:
                stream = answer.aiter_raw()
                assert await anext(stream)
                api.fake.fail(api.fake.requests[0].handle)
                async for _ in stream:
                    pass
        await clean(api)
        state = (await api.client.get("/v1/requests/s")).json()
        assert (state["status"], state["error"]["code"]) == ("failed", "engine_error")


async def test_a_client_that_does_not_read_is_cancelled_and_others_are_not_slowed(started: Started) -> None:
    async with started(stall_timeout_s=0.5) as api:
        with socket.create_connection(("127.0.0.1", api.process.port)) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = b"text=x&output_modalities=audio&request_id=slow"
            head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n"
            head += b"Content-Length: %d\r\n\r\n"
            slow.sendall(head % len(body) + body)
            request = await api.fake.next_request()
            for _ in range(400):
                api.fake.audio(request.handle, 20_000)
            other = asyncio.create_task(api.client.post("/generate", data=GOOD))
            speak(2)(api.fake, await api.fake.next_request(2))
            assert len((await other).text.splitlines()) == 2
            await api.fake.until(lambda: [(c.handle, c.why) for c in api.fake.cancels] == [(request.handle, "stalled")])
        await clean(api)
        await api.fake.until(lambda: api.fake.live_loans == 0)


async def test_a_bad_message_between_good_ones_disturbs_nobody(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.audio(request.handle)
        fake.audio(12345)
        fake.finish(12345)
        fake._couriers["conductor"]._peers["api"].socket.send(b"\xc1nonsense")
        fake.finish(request.handle)

    async with started(script) as api:
        answer = await api.client.post("/generate", data=GOOD)
        assert len(answer.text.splitlines()) == 1


async def test_stop_ends_the_process_and_tells_open_requests(started: Started) -> None:
    async with started() as api:
        task = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.fake.next_request()
        api.fake.tell(Stop(reason="down"))
        assert api.process.stopped is not None
        assert await api.process.stopped == "down"
        await api.process.close()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await api.fake.until(lambda: [c.why for c in api.fake.cancels] == ["drain"])


async def test_a_pool_process_that_dies_costs_one_request(started: Started) -> None:
    async with started(speak(1), pool_processes=2) as api:
        texts = ["kill" if index % 5 == 0 else "fine" for index in range(10)]
        forms = [{"text": text, "output_modalities": "audio"} for text in texts]
        answers = await asyncio.gather(*(api.client.post("/generate", data=form) for form in forms))
        assert [answer.status_code for answer in answers] == [422 if text == "kill" else 200 for text in texts]
