"""STUN and TURN servers of WebRTC calls: those that a client gets, and those that the api's connections use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mstar_core.api.realtime.webrtc.ice_servers import ice_servers, turn_password
from mstar_core.config.resolved import ApiConfig, IceServer
from tests.api.conftest import Api, Started
from tests.api.realtime.client import service_of
from tests.api.realtime.test_realtime_calls import calling, tone
from tests.api.test_app_reload import reload
from tests.fakes.ice_server import MAPPED, RELAYED, ice_server
from tests.fakes.omni_model import SPEC

SECRETS = "/v1/realtime/client_secrets"
STUN = IceServer(urls=("stun:stun.example.org:3478",))
FIXED = IceServer(urls=("turn:turn.example.org?transport=tcp",), username="ann", credential_file="/password")
EXPIRING = IceServer(urls=("turns:turn.example.org:5349",), secret_file="/secret")


def test_users_of_a_secret_expire_and_have_the_password_of_the_turn_rest_api() -> None:
    # openssl dgst -sha1 -hmac north -binary <<< (without newline) "1433895918:mstar" | base64
    assert turn_password("north", "1433895918:mstar") == "/nveI6G5cSm8hWAP18W5GmWxWM4="
    named = IceServer(urls=EXPIRING.urls, username="talk", secret_file="/secret")
    api = ApiConfig(realtime_ice_servers=(STUN, FIXED, EXPIRING, named), ice_secrets=("", "pw", "north", "north"))
    stun, fixed, expiring, own = (answer for answer in ice_servers(api, 1433895918.7))
    assert (stun.urls, stun.username) == (["stun:stun.example.org:3478"], type(stun)(urls=[]).username)
    assert (fixed.username, fixed.credential) == ("ann", "pw")
    assert (expiring.username, expiring.credential) == ("1433895918:mstar", "/nveI6G5cSm8hWAP18W5GmWxWM4=")
    assert own.username == "1433895918:talk" and own.credential == turn_password("north", "1433895918:talk")


async def test_a_client_secret_comes_with_the_servers(started: Started) -> None:
    facts = {"realtime_ice_servers": (STUN, EXPIRING), "ice_secrets": ("", "north"), "realtime_max_s": 100.0}
    async with started(tone, model=SPEC, **facts) as api:
        before = int(time.time())
        answer = await api.client.post(SECRETS, json={"expires_after": {"seconds": 60}})
        stun, turn = answer.json()["ice_servers"]
        assert stun == {"urls": ["stun:stun.example.org:3478"]}
        expires = int(turn["username"].partition(":")[0])
        assert before + 160 <= expires <= int(time.time()) + 160  # the secret's time, and that of a session
        assert turn["credential"] == turn_password("north", turn["username"])
        assert "north" not in answer.text


async def test_without_servers_a_client_secret_names_none(started: Started) -> None:
    async with started(tone, model=SPEC) as api:
        assert "ice_servers" not in (await api.client.post(SECRETS, json={})).json()


async def test_an_answer_offers_the_address_that_a_stun_server_sees(started: Started) -> None:
    async with ice_server() as server:
        servers = (IceServer(urls=(f"stun:127.0.0.1:{server.port}",)),)
        async with started(tone, model=SPEC, realtime_ice_servers=servers, ice_secrets=("",)) as api:
            async with offered(api, f"{MAPPED[0]} {MAPPED[1]} typ srflx"):
                assert server.bindings
            await api.until(lambda: not len(service_of(api).sessions))


async def test_a_call_holds_an_address_of_a_turn_server_until_it_ends(started: Started) -> None:
    async with ice_server() as server:
        servers = (IceServer(urls=(f"turn:127.0.0.1:{server.port}?transport=udp",), secret_file="/secret"),)
        async with started(tone, model=SPEC, realtime_ice_servers=servers, ice_secrets=("north",)) as api:
            given = (await api.client.post(SECRETS, json={})).json()["ice_servers"][0]
            server.users = Expiring("north")
            assert server.users[given["username"]] == given["credential"]
            async with offered(api, f"{RELAYED[0]} {RELAYED[1]} typ relay"):
                held = len(server.allocated)
                assert held and not server.refused
            await api.until(lambda: len(server.allocated) < held)


async def test_a_server_that_gives_no_address_is_named_in_the_log(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with ice_server() as server:
        url = f"turn:127.0.0.1:{server.port}"
        servers = (IceServer(urls=(url,), username="ann", credential_file="/password"),)
        async with started(tone, model=SPEC, realtime_ice_servers=servers, ice_secrets=("wrong",)) as api:
            async with calling(api) as caller:
                assert "typ relay" not in caller.answer
        (record,) = [each for each in caplog.records if each.getMessage() == "an ICE server gave no address"]
        assert record.__dict__["facts"] == {"url": url, "candidate": "relay"}


@asynccontextmanager
async def offered(api: Api, candidate: str) -> AsyncIterator[None]:
    """Call, with a candidate of the api in its answer. Gathering has 5 s, so it may be missing on a stalled machine."""
    for _ in range(5):
        async with calling(api) as caller:
            if candidate in caller.answer:
                yield
                return
    raise AssertionError(f"no answer has {candidate}: {caller.answer}")


class Expiring(dict[str, str]):
    """Users of a TURN server with a shared secret: name -> password."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and int(name.partition(":")[0]) > time.time()

    def __getitem__(self, name: str) -> str:
        return turn_password(self._secret, name)


async def test_a_reload_takes_another_secret_for_later_calls(started: Started) -> None:
    async with started(tone, model=SPEC, realtime_ice_servers=(EXPIRING,), ice_secrets=("north",)) as api:
        for secret in ("north", "south"):
            await reload(api, ice_secrets=(secret,))
            (turn,) = (await api.client.post(SECRETS, json={})).json()["ice_servers"]
            assert turn["credential"] == turn_password(secret, turn["username"])
