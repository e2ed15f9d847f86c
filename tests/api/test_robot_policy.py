"""Robot policy socket with a WebSocket client: messages, parameters, errors, deadlines, keys, limits, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mstar_core.plugin.observation import packed, unpacked
from tests.api.conftest import LIMIT_S, LIMITS, Api, Started
from tests.fakes.robot_model import GREETING, SPEC, STEPS, act

STATE = np.array([3, 1, 4], dtype=np.float32)
PATHS = ("/", "/v1/robot/policy")


@asynccontextmanager
async def robot(api: Api, path: str = "/", **options: Any) -> AsyncIterator[ClientConnection]:
    """Connect like openpi's client, without compression or size limit, and read the greeting."""
    options = {"compression": None, "max_size": None, "open_timeout": LIMIT_S, "ping_timeout": None, **options}
    async with connect(f"{api.url.replace('http', 'ws')}{path}", **options) as socket:
        period = {"period_ms": 100.0} if "period_ms=100" in path else {}
        assert unpacked(await received(socket)) == {**GREETING, **period}
        yield socket


async def received(socket: ClientConnection) -> bytes:
    message = await asyncio.wait_for(socket.recv(), LIMIT_S)
    assert isinstance(message, bytes), message
    return message


async def infer(socket: ClientConnection, **more: Any) -> dict[str, Any]:
    await socket.send(packed({"state": STATE, **more}))
    answer: dict[str, Any] = unpacked(await received(socket))
    return answer


async def failure(socket: ClientConnection) -> tuple[str, int, str]:
    """Return the text, the close code and the close reason of a failed connection."""
    text = await asyncio.wait_for(socket.recv(), LIMIT_S)
    assert isinstance(text, str)
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(socket.recv(), LIMIT_S)
    assert socket.close_code is not None
    return text, socket.close_code, str(socket.close_reason)


async def refusal(api: Api, path: str = "/", headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Return status and error of a refused handshake."""
    with pytest.raises(InvalidStatus) as caught:
        async with robot(api, path, additional_headers=headers or {}):
            pass
    body: dict[str, Any] = (await api.client.get(path, headers={**(headers or {}), "Upgrade": "websocket"})).json()
    return caught.value.response.status_code, body["error"]


@pytest.mark.parametrize("path", PATHS)
async def test_observations_become_actions_on_one_connection(path: str, started: Started) -> None:
    async with started(act, model=SPEC) as api:
        async with robot(api, path) as socket:
            first, second = await infer(socket), await infer(socket, warns=True)
        wanted = np.stack([STATE + step for step in range(STEPS)])
        assert first["actions"].dtype == np.float32 and np.array_equal(first["actions"], wanted)
        assert set(first["server_timing"]) == {"infer_ms"} and first["normalized"] is False
        timing = second["server_timing"]
        assert timing["prev_total_ms"] >= first["server_timing"]["infer_ms"] >= first["policy_timing"]["infer_ms"] > 0
        assert (first["warnings"], second["warnings"]) == ([], ["a warning"])
        assert first["request_id"] != second["request_id"]
        assert [request.outputs for request in api.fake.requests] == [["action"], ["action"]]
        await api.until(lambda: api.service_is_clean)
        assert 'mstar_requests_total{code="ok",route="robot_policy' in (await api.client.get("/metrics")).text


async def test_the_path_of_the_connection_holds_parameters_and_ids(started: Started) -> None:
    async with started(act, model=SPEC) as api:
        headers = {"X-Request-ID": "arm-7"}
        path = "/v1/robot/policy?num_steps=4&seed=11&timeout_s=300"
        async with robot(api, path, additional_headers=headers) as socket:
            answers = [await infer(socket) for _ in range(2)]
        assert [answer["request_id"] for answer in answers] == ["arm-7-1", "arm-7-2"]
        for request in api.fake.requests:
            assert (request.params["num_steps"], request.seed) == (4, 11)
            assert request.deadline_s is not None and 200 < request.deadline_s <= 300
        state = (await api.client.get("/v1/requests/arm-7-2")).json()
        assert (state["status"], state["route"]) == ("finished", "robot_policy")


async def test_the_period_of_the_control_loop_is_reported_and_unknown_without_one(started: Started) -> None:
    async with started(act, model=SPEC) as api:
        for path in ("/v1/robot/policy?period_ms=100", "/"):
            async with robot(api, path) as socket:
                await infer(socket)
        assert await api.loops(2) == [(100.0, None), (None, None)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("num_steps=99", "num_steps"),
        ("num_step=3", "num_step"),
        ("num_steps=1&num_steps=2", "num_steps"),
        ("output_format=npy", "output_format"),
        ("timeout_s=-1", "timeout_s"),
        ("seed=x", "seed"),
        ("period_ms=0", "period_ms"),
        ("period_ms=5e-324", "period_ms"),
        ("skipped_ticks=1", "period_ms"),
        ("period_ms=50&skipped_ticks=1.5", "skipped_ticks"),
    ],
)
async def test_a_wrong_parameter_refuses_the_handshake(query: str, param: str, started: Started) -> None:
    async with started(act, model=SPEC) as api:
        status, error = await refusal(api, f"/?{query}")
        assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "said", "reason"),
    [
        (packed({"prompt": "go"}), "state is missing", "missing_field"),
        (b"\xc1", "must be msgpack", "invalid_value"),
        ("text", "binary msgpack", "invalid_value"),
    ],
)
async def test_a_wrong_observation_is_told_in_words_and_ends_the_connection(
    message: bytes | str, said: str, reason: str, started: Started
) -> None:
    async with started(act, model=SPEC) as api:
        async with robot(api) as socket:
            await infer(socket)
            await socket.send(message)
            text, code, why = await failure(socket)
        assert said in text and "Traceback" not in text and "\n" not in text
        assert (code, why) == (1011, reason)
        async with robot(api) as socket:  # the next one is served
            assert "actions" in await infer(socket)
        await api.until(lambda: api.service_is_clean)


async def test_a_failed_engine_tells_neither_path_nor_traceback(started: Started) -> None:
    async with started(lambda fake, request: fake.fail(request.handle), model=SPEC) as api, robot(api) as socket:
        await socket.send(packed({"state": STATE}))
        text, code, why = await failure(socket)
        assert "secret" not in text and (code, why) == (1011, "engine_error")


async def test_a_deadline_ends_an_inference(started: Started) -> None:
    async with started(None, model=SPEC) as api:
        for limit in LIMITS:
            async with robot(api, f"/?timeout_s={limit}") as socket:
                await socket.send(packed({"state": STATE}))
                text, code, why = await failure(socket)
            assert f"{limit:g} s" in text and (code, why) == (1011, "timeout")
            await api.clean()
            if api.fake.requests:
                break
        await api.fake.until(lambda: bool(api.fake.cancels))
        assert api.fake.cancels[0].why == "deadline"


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_robot_that_goes_cancels_what_runs(how: str, started: Started) -> None:
    async with started(None, model=SPEC) as api:
        async with robot(api) as socket:
            await socket.send(packed({"state": STATE}))
            await api.fake.until(lambda: bool(api.fake.requests))
            if how == "close":
                await socket.close()
            else:
                socket.transport.abort()
            await api.fake.until(lambda: bool(api.fake.cancels))
        assert api.fake.cancels[0].why == "disconnect"
        await api.until(lambda: api.service_is_clean)


async def test_a_robot_that_waits_is_cancelled_by_its_id(started: Started) -> None:
    async with started(None, model=SPEC) as api, robot(api, additional_headers={"X-Request-ID": "arm"}) as socket:
        await socket.send(packed({"state": STATE}))
        await api.fake.until(lambda: bool(api.fake.requests))
        assert (await api.client.post("/v1/requests/arm-1/cancel")).json()["status"] == "cancelled"
        assert (await failure(socket))[1:] == (1011, "cancelled")


async def test_keys_are_asked_for_at_the_handshake(started: Started) -> None:
    async with started(act, model=SPEC, api_keys=("good",)) as api:
        status, error = await refusal(api, headers={"Authorization": "Api-Key bad"})
        assert (status, error["code"]) == (401, "invalid_api_key")
        async with robot(api, additional_headers={"Authorization": "Api-Key good"}) as socket:
            assert "actions" in await infer(socket)
        assert (await api.client.get("/healthz")).text == "OK\n"


async def test_a_full_queue_is_told_to_the_robot_it_meets(started: Started) -> None:
    async with started(None, model=SPEC, max_concurrent_requests=1, max_queue=0) as api:
        async with robot(api) as first, robot(api) as second:
            await first.send(packed({"state": STATE}))
            await api.fake.until(lambda: bool(api.fake.requests))
            await second.send(packed({"state": STATE}))
            text, code, why = await failure(second)
            assert "queue is full" in text and (code, why) == (1011, "queue_full")


async def test_many_robots_get_their_own_actions(started: Started) -> None:
    async with started(act, model=SPEC) as api:

        async def drive(number: int) -> None:
            async with robot(api) as socket:
                for turn in range(3):
                    state = np.array([number, turn], dtype=np.float32)
                    await socket.send(packed({"state": state}))
                    answer = unpacked(await received(socket))
                    assert np.array_equal(answer["actions"][0], state)

        await asyncio.gather(*(drive(number) for number in range(8)))
        await api.until(lambda: api.service_is_clean)


async def test_a_message_over_the_limit_closes_the_connection(started: Started) -> None:
    async with started(act, model=SPEC) as api:
        async with robot(api) as socket:
            with pytest.raises(ConnectionClosed):
                await socket.send(b"\0" * (16 * 2**20 + 1))
                await received(socket)
            assert socket.close_code == 1009
        async with robot(api) as socket:
            answer = await infer(socket, image=np.zeros(8 * 2**20, np.uint8))
            assert "actions" in answer
        await api.clean()


async def test_pages_of_other_origins_may_not_connect(started: Started) -> None:
    async with started(act, model=SPEC, cors_origins=("https://good.example",)) as api:
        status, error = await refusal(api, headers={"Origin": "https://bad.example"})
        assert (status, error["code"]) == (403, "origin_not_allowed")
        for origin in ("https://good.example", api.url):
            async with robot(api, origin=origin) as socket:
                assert "actions" in await infer(socket)


async def test_plain_http_is_told_to_upgrade(started: Started) -> None:
    async with started(act, model=SPEC, console=False) as api:  # the web page otherwise answers at /
        for path in PATHS:
            answer = await api.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_required")
            assert answer.headers["upgrade"] == "websocket"
        answer = await api.client.get("/", headers={"Upgrade": "websocket", "Connection": "Upgrade"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")


async def test_a_deployment_that_is_not_ready_refuses_the_handshake(started: Started) -> None:
    async with started(act, model=SPEC, ready=False) as api:
        assert (await refusal(api))[0] == 503
        assert (await api.client.get("/healthz")).status_code == 200


async def test_other_models_have_no_such_socket(started: Started) -> None:
    async with started(console=False) as api:
        for path in (*PATHS, "/healthz"):
            answer = await api.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_endpoint")


async def test_the_end_of_the_api_closes_open_connections(started: Started) -> None:
    async with started(act, model=SPEC) as api, robot(api) as socket:
        await infer(socket)
        await api.process.close()
        with pytest.raises(ConnectionClosed):
            await received(socket)
        assert socket.close_code == 1001
