"""Sessions of /v1/realtime: keys, client secrets, lost connections, limits, clients that do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.realtime import ClientSecretCreateResponse
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mstar_core.api.realtime.event_log import WAITING_BYTES
from mstar_core.api.realtime.session import RealtimeSession
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import LIMIT_S, Api, Started
from tests.api.realtime.client import conversing, service_of
from tests.fakes.conductor import FakeDeployment, echo, say
from tests.fakes.omni_model import SPEC
from tests.fakes.robot_model import SPEC as ROBOT

SECRETS = "/v1/realtime/client_secrets"


async def refusal(api: Api, path: str = "/v1/realtime", **options: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of a refused handshake."""
    with pytest.raises(InvalidStatus) as caught:
        async with connect(f"{api.url.replace('http', 'ws')}{path}", open_timeout=LIMIT_S, **options):
            pass
    return caught.value.response.status_code, json.loads(caught.value.response.body)["error"]


async def test_the_client_of_openai_converses(started: Started) -> None:
    async with started(say(b"Hello"), model=SPEC) as api:
        client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any")
        async with client.realtime.connect(model="fake") as connection:
            await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
            )
            await connection.response.create()
            text = ""
            async with asyncio.timeout(LIMIT_S):
                async for event in connection:
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    if event.type == "response.done":
                        break
            assert text == "Hello"
        await client.close()
        await api.until(lambda: not len(service_of(api).sessions))


async def test_a_lost_connection_goes_on_behind_the_last_event(started: Started) -> None:
    async with started(None, model=SPEC) as api:
        async with conversing(api) as client:
            session = client.events[0]["session"]["id"]
            await client.say("hi")
            await client.send("response.create", response={"output_modalities": ["text"]})
            request = await api.fake.next_request()
            api.fake.text(request.handle, b"ab")
            seen = (await client.until("response.output_text.delta"))["event_id"]
            client.socket.transport.abort()
        await api.until(lambda: not service_of(api).sessions.connected)
        api.fake.text(request.handle, b"cd")
        api.fake.finish(request.handle)
        await api.clean()
        async with conversing(api, f"/v1/realtime?resume={session}&after={seen}") as client:
            done = (await client.until("response.done"))["response"]
            assert "".join(event["delta"] for event in client.of("response.output_text.delta")) == "bcd"
            assert done["output"][0]["content"][0]["text"] == "abcd"
            await client.say("more")
        async with conversing(api) as client:
            await client.socket.close()
        await api.until(lambda: not len(service_of(api).sessions))


async def test_a_new_connection_replaces_one_that_is_still_open(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as first:
        session = first.events[0]["session"]["id"]
        await first.say("one")
        async with conversing(api, f"/v1/realtime?resume={session}&after=0") as second:
            assert (await second.next())["type"] == "session.created"
            with pytest.raises(ConnectionClosed):
                await first.next()
            await second.until("conversation.item.done")
            await second.respond(output_modalities=["text"])
            assert api.fake.prompt(api.fake.requests[0]) == "<user>one<assistant>"


async def test_a_session_without_a_connection_ends_after_its_time(started: Started) -> None:
    async with started(None, model=SPEC) as api:
        service_of(api).sessions.kept_s = 0.05
        async with conversing(api) as client:
            session = client.events[0]["session"]["id"]
            await client.say("hi")
            await client.send("response.create")
            await api.fake.next_request()
            client.socket.transport.abort()
        await api.fake.until(lambda: bool(api.fake.cancels))
        await api.clean()
        status, error = await refusal(api, f"/v1/realtime?resume={session}")
        assert (status, error["code"]) == (404, "session_not_found")


async def test_a_wrong_query_refuses_the_handshake(started: Started) -> None:
    wrong = {
        "x=1": (400, "x"),
        "after=3": (400, "after"),
        "resume=none": (404, "resume"),
        "model=a&model=b": (400, "model"),
    }
    async with started(echo, model=SPEC) as api:
        for query, expected in wrong.items():
            status, error = await refusal(api, f"/v1/realtime?{query}")
            assert (status, error["param"]) == expected


async def test_a_place_behind_the_end_or_before_the_kept_events_is_refused(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        session = client.events[0]["session"]["id"]
        for after in ("99", "x", "event_99"):
            status, error = await refusal(api, f"/v1/realtime?resume={session}&after={after}")
            assert (status, error["param"]) == (400, "after")
        assert await client.say("still here")


async def test_keys_and_client_secrets_open_sessions(started: Started) -> None:
    async with started(echo, model=SPEC, api_keys=("good",), cors_origins=("https://app.example",)) as api:
        status, error = await refusal(api, additional_headers={"Authorization": "Bearer bad"})
        assert (status, error["code"]) == (401, "invalid_api_key")
        key = {"Authorization": "Bearer good"}
        body = {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": {"instructions": "Be kind."}}
        answer = await api.client.post(SECRETS, json=body, headers=key)
        made = ClientSecretCreateResponse.model_validate_json(answer.content, strict=True)
        assert made.session.type == "realtime" and made.value.startswith("ek_")
        protocols = ["realtime", f"openai-insecure-api-key.{made.value}"]
        browser = {"subprotocols": protocols, "origin": "https://app.example"}
        async with conversing(api, **browser) as client:
            assert client.socket.subprotocol == "realtime"
            assert client.events[0]["session"]["instructions"] == "Be kind."
            session = client.events[0]["session"]["id"]
            async with conversing(api, f"/v1/realtime?resume={session}", additional_headers=key) as other:
                assert (await other.next())["type"] == "session.created"
        async with conversing(api, additional_headers={"Authorization": f"Bearer {made.value}"}):
            pass
        assert (
            await api.client.get("/v1/models", headers={"Authorization": f"Bearer {made.value}"})
        ).status_code == 401
        assert (await refusal(api, subprotocols=["realtime", "openai-insecure-api-key.ek_x"]))[0] == 401


async def test_a_client_secret_ends_with_its_time(started: Started) -> None:
    async with started(echo, model=SPEC, api_keys=("good",)) as api:
        secrets = service_of(api).client_secrets
        value, _ = secrets.create("digest", -1.0, {})
        assert secrets.find(value) is None and secrets.find("ek_unknown") is None
        assert (await refusal(api, additional_headers={"Authorization": f"Bearer {value}"}))[0] == 401


async def test_a_wrong_request_for_a_secret_names_its_field(started: Started) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"expires_after": {"seconds": 5}}, "expires_after.seconds"),
        ({"session": {"audio": {"output": {"speed": 3}}}}, "session.audio.output.speed"),
        ({"sesion": {}}, "sesion"),
    ]
    async with started(echo, model=SPEC) as api:
        for body, param in wrong:
            answer = await api.client.post(SECRETS, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_sessions_have_a_limit_and_those_without_a_connection_give_way(started: Started) -> None:
    async with started(echo, model=SPEC, realtime_max_sessions=1) as api:
        async with conversing(api) as client:
            status, error = await refusal(api)
            assert (status, error["code"]) == (429, "session_limit")
            assert "close one" in error["message"]
            client.socket.transport.abort()
        await api.until(lambda: not service_of(api).sessions.connected)
        async with conversing(api):
            assert len(service_of(api).sessions) == 1


async def test_clients_that_come_at_once_get_a_place_or_a_refusal_before_the_handshake(started: Started) -> None:
    async def attempt(api: Api) -> int:
        try:
            async with conversing(api) as client:
                await everyone.wait()
                await client.say("hi")
                return 101
        except InvalidStatus as refused:
            assert refused.response.headers["Retry-After"] == "5"
            return refused.response.status_code
        finally:
            done.append(None)

    everyone, done = asyncio.Event(), list[None]()
    async with started(echo, model=SPEC, realtime_max_sessions=2) as api:
        attempts = [asyncio.create_task(attempt(api)) for _ in range(8)]
        await api.until(lambda: len(done) == 6)
        everyone.set()
        assert sorted(await asyncio.gather(*attempts)) == [101, 101, *[429] * 6]
        await api.until(lambda: not len(service_of(api).sessions))


async def test_a_handshake_that_fails_takes_no_place(started: Started) -> None:
    async with started(echo, model=SPEC, realtime_max_sessions=1) as api:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "7"}
        assert (await api.client.get("/v1/realtime", headers=headers)).status_code == 400
        async with conversing(api) as client:
            await client.say("hi")


@pytest.mark.parametrize("limit", ["realtime_idle_s", "realtime_max_s"])
async def test_an_old_or_idle_session_ends_with_a_reason(limit: str, started: Started) -> None:
    async with started(echo, model=SPEC, **{limit: 0.1}) as api, conversing(api) as client:
        assert (await client.until("error"))["error"]["code"] == "session_expired"
        with pytest.raises(ConnectionClosed):
            await client.next()
        assert client.socket.close_code == 1000
        await api.until(lambda: not len(service_of(api).sessions))


async def test_a_client_that_never_reads_stalls_its_own_answer_and_is_disconnected(started: Started) -> None:
    def flood(fake: FakeDeployment, request: NewRequest) -> None:
        for _ in range(30):
            fake.audio(request.handle, 240_000)

    scripts = iter((flood, say(b"ok")))
    async with started(lambda f, r: next(scripts)(f, r), model=SPEC, stall_timeout_s=1.0) as api:
        async with conversing(api) as client:
            await client.say("hi")
            client.socket.transport.pause_reading()
            await client.send("response.create")
            await api.fake.next_request()
            async with conversing(api) as other:
                await other.say("hi")
                assert (await other.respond(output_modalities=["text"]))["status"] == "completed"
            await api.until(lambda: not service_of(api).sessions.connected)
            session = service_of(api).sessions.find(client.events[0]["session"]["id"], "")
            assert isinstance(session, RealtimeSession)
            assert session.sent.waiting_bytes < WAITING_BYTES + 2 * 640_000, "one piece of sound beyond the limit"
            client.socket.transport.abort()
        service_of(api).sessions.end(client.events[0]["session"]["id"])
        await api.clean()


async def test_other_models_have_no_realtime_and_plain_http_is_told_to_upgrade(started: Started) -> None:
    async with started(model=ROBOT) as api:
        assert (await api.client.get("/v1/realtime")).json()["error"]["code"] == "unsupported_endpoint"
    async with started(model=SPEC) as api:
        assert (await api.client.get("/v1/realtime")).status_code == 426
        assert "/v1/realtime" in (await api.client.get("/v1/models")).json()["data"][0]["endpoints"]
    async with started(model=SPEC, ready=False) as api:
        assert (await refusal(api))[0] == 503


async def test_the_end_of_the_api_ends_its_sessions(started: Started) -> None:
    async with started(None, model=SPEC) as api, conversing(api) as client:
        await client.say("hi")
        await client.send("response.create")
        await api.fake.next_request()
        closing = asyncio.create_task(api.process.close())
        error = (await client.until("error"))["error"]
        assert error["code"] == "draining" and "later" in error["message"]
        with pytest.raises(ConnectionClosed):
            await client.next()
        assert client.socket.close_code == 1001
        await closing
