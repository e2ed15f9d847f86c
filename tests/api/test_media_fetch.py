"""Remote media: disabled by default, only allowed hosts, only public addresses, only the checked address."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mstar_core.api.parse.media import ByteAllowance, Fetcher, is_public
from mstar_core.errors import MstarError, TooLarge
from tests.api.conftest import Started
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC

PUBLIC = "93.184.216.34"
HOSTS = ("media.example", "files.example:8443")


def resolver(*answers: Sequence[str]) -> tuple[list[str], Any]:
    """Return a resolver with these answers in turn, and the list of hosts it was called with."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers[min(len(asked), len(answers)) - 1]

    return asked, resolve


def fetcher(
    answer: Callable[[httpx.Request], httpx.Response],
    *answers: Sequence[str],
    limit_bytes: int = 1000,
    limit_s: float = 60,
) -> Fetcher:
    _, resolve = resolver(*(answers or ([PUBLIC],)))
    return Fetcher(HOSTS, limit_bytes, resolve=resolve, transport=httpx.MockTransport(answer), limit_s=limit_s)


def ok(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(b"media"))


async def code_of(fetch: Fetcher, url: str) -> str:
    try:
        await fetch.fetch(url, "x")
    except MstarError as error:
        assert error.facts["field"] == "x"
        return error.code
    return "ok"


NOT_PUBLIC = (
    "127.0.0.1",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "198.18.0.1",
    "192.0.2.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "::127.0.0.1",
    "fd00:ec2::254",
    "fec0::1",
    "100::1",
    "3fff::1",
    "5f00::1",
    "192.0.0.8",
    "192.0.0.170",
    "192.88.99.1",
    "2001:2::1",
    "2001:20::1",
)


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_known_as_such(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(st.ip_addresses(v=4))
@example(ipaddress.IPv4Address("127.0.0.1"))
def test_an_address_is_no_more_public_in_the_clothes_of_ipv6(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    assert is_public(ipaddress.IPv6Address(0xFFFF << 32 | number)) == is_public(address)
    for base in (0x64FF9B << 96, 0x2002 << 112, 0):
        shift = 80 if base >> 112 == 0x2002 else 0
        assert not is_public(ipaddress.IPv6Address(base | number << shift))


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return ok(request)

    asked, resolve = resolver([PUBLIC], ["127.0.0.1"])  # a name whose address changes immediately
    fetch = Fetcher(HOSTS, 1000, resolve=resolve, transport=httpx.MockTransport(answer))
    assert await fetch.fetch("https://Media.Example/a.png?b=c", "x") == b"media"
    (request,) = seen
    assert str(request.url) == f"https://{PUBLIC}/a.png?b=c"
    assert (request.headers["host"], request.extensions["sni_hostname"]) == ("media.example", "media.example")
    assert asked == ["media.example"]  # resolved once only
    assert not {"cookie", "authorization"} & set(request.headers)
    assert await code_of(fetch, "https://media.example/") == "remote_media_disabled"


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:169.254.169.254"], ["fe80::1%eth0"]]
)
async def test_one_private_address_of_a_name_is_enough_to_refuse_it(addresses: list[str]) -> None:
    assert await code_of(fetcher(ok, addresses), "http://media.example/") == "remote_media_disabled"


URLS = {
    "https://media.example/a": "ok",
    "https://media.example:443/a": "ok",
    "http://files.example:8443/a": "ok",
    "https://media.example.:443/a": "ok",
    "https://media.example:8443/a": "remote_media_disabled",
    "https://files.example/a": "remote_media_disabled",
    "https://other.example/a": "remote_media_disabled",
    "https://media.example.evil.example/": "remote_media_disabled",
    "https://evil.example/media.example": "remote_media_disabled",
    "http://127.0.0.1/": "remote_media_disabled",
    "http://2130706433/": "remote_media_disabled",
    "http://0x7f.1/": "remote_media_disabled",
    "http://[::1]/": "remote_media_disabled",
    "https://media.example@evil.example/": "invalid_value",
    "https://user:word@media.example/": "invalid_value",
    "ftp://media.example/a": "invalid_value",
    "file:///etc/passwd": "invalid_value",
    "gopher://media.example": "invalid_value",
    "//media.example/a": "invalid_value",
    "/etc/passwd": "invalid_value",
    "": "invalid_value",
    "https://": "invalid_value",
    "https://media.example:99999/": "invalid_value",
    "https://[::1/": "invalid_value",
    "https:///a": "invalid_value",
    "javascript:alert(1)": "invalid_value",
}


@pytest.mark.parametrize("url", sorted(URLS))
async def test_urls_are_taken_or_refused_by_form_and_host(url: str) -> None:
    assert await code_of(fetcher(ok), url) == URLS[url]


@given(st.text(max_size=60) | st.from_regex(r"https?://[^/]{0,20}(/.*)?", fullmatch=True))
def test_no_text_is_more_than_refused(text: str) -> None:
    fetch = Fetcher((), 10)
    with pytest.raises(MstarError) as refused:
        fetch.check(text, "x")
    assert refused.value.status == 400


async def test_redirects_are_judged_like_new_urls_and_counted() -> None:
    def hop(request: httpx.Request) -> httpx.Response:
        number = int(request.url.path.strip("/") or 0)
        return httpx.Response(302, headers={"Location": f"/{number + 1}"}) if number < 3 else ok(request)

    assert await code_of(fetcher(hop), "https://media.example/0") == "ok"

    def endless(request: httpx.Request) -> httpx.Response:
        return httpx.Response(307, headers={"Location": "/again"})

    assert await code_of(fetcher(endless), "https://media.example/") == "media_unreachable"
    for target, code in (
        ("http://169.254.169.254/latest", "remote_media_disabled"),
        ("file:///etc/passwd", "invalid_value"),
        ("https://evil.example/", "remote_media_disabled"),
    ):
        away = fetcher(lambda request, to=target: httpx.Response(302, headers={"Location": to}))  # type: ignore[misc]
        assert await code_of(away, "https://media.example/") == code
    moved = fetcher(hop, [PUBLIC], ["127.0.0.1"])
    assert (
        await code_of(moved, "https://media.example/2") == "remote_media_disabled"
    )  # the second redirect is resolved again


async def test_sizes_times_and_answers_are_bounded() -> None:
    for size, code in ((1000, "ok"), (1001, "media_too_large")):
        sized = fetcher(lambda request, n=size: httpx.Response(200, stream=httpx.ByteStream(bytes(n))))  # type: ignore[misc]
        assert await code_of(sized, "https://media.example/") == code
    for status in (204, 404, 500):
        failing = fetcher(lambda request, s=status: httpx.Response(s))  # type: ignore[misc]
        assert await code_of(failing, "https://media.example/") == "media_unreachable"
    packed = fetcher(
        lambda request: httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"x"))
    )
    assert await code_of(packed, "https://media.example/") == "media_unreachable"

    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no")

    assert await code_of(fetcher(broken), "https://media.example/") == "media_unreachable"

    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    slow = Fetcher(HOSTS, 10, resolve=never, limit_s=0.05)
    assert await code_of(slow, "https://media.example/") == "media_unreachable"
    assert await code_of(fetcher(ok, []), "https://media.example/") == "remote_media_disabled"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    body = media.image(9, 7)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def test_an_allowed_host_is_fetched_over_a_real_connection(started: Started) -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    host = f"localhost:{port}"
    body = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{host}/a"}}]}]
    }
    fetcher = Fetcher((host,), 10_000, may_connect=lambda address: address.is_loopback)
    async with server:  # for both, so that the port stays reserved
        async with started(echo, model=SPEC, remote_media=(host,)) as api:
            refused = await api.client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "remote_media_disabled")
        async with started(echo, model=SPEC, fetcher=fetcher) as api:
            answer = await api.client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "<user>[image 9x7]<assistant>"
            await api.clean()


async def test_data_urls_need_no_permission(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        data = media.image(3, 2)
        percent = "".join(f"%{byte:02x}" for byte in data)
        for url in (
            "data:image/png;base64," + base64.b64encode(data).decode(),
            "DATA:;base64," + base64.b64encode(data).decode().replace("/", "%2F"),
            f"data:image/png,{percent}",
        ):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            answer = await api.client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
            )
            assert answer.json()["choices"][0]["message"]["content"] == "<user>[image 3x2]<assistant>", url[:30]


async def test_a_redirect_to_nowhere_is_the_hosts_fault_and_not_ours() -> None:
    for target in ("http://[", "https://media.example:999999999/", "http://\x00/"):
        away = fetcher(lambda request, to=target: httpx.Response(302, headers={"Location": to}))  # type: ignore[misc]
        assert await code_of(away, "https://media.example/") != "ok", target


async def test_all_urls_of_a_request_share_one_allowance() -> None:
    fetch = fetcher(lambda request: httpx.Response(200, stream=httpx.ByteStream(bytes(400))))
    allowance = ByteAllowance(1000)
    for _ in range(2):
        assert len(await fetch.fetch("https://media.example/", "x", allowance)) == 400
    with pytest.raises(TooLarge):
        await fetch.fetch("https://media.example/", "x", allowance)
    assert len(await fetch.fetch("https://media.example/", "x", ByteAllowance(1000))) == 400


async def test_a_name_is_resolved_as_it_stands_in_host_and_certificate() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return ok(request)

    asked, resolve = resolver([PUBLIC])
    named = ("stra\u00dfe.example", "[2606:2800:220:1::1]", "2606:2800:220:1::1")
    fetch = Fetcher(named, 1000, resolve=resolve, transport=httpx.MockTransport(answer))
    await fetch.fetch("https://stra\u00dfe.example/", "x")
    # Two standards for such names differ here: with the older one, used by getaddrinfo, the name is another host.
    assert asked[0] == seen[0].headers["host"] == seen[0].extensions["sni_hostname"] == "xn--strae-oqa.example"
    await fetch.fetch("https://[2606:2800:220:1::1]/", "x")
    assert seen[1].headers["host"] == "[2606:2800:220:1::1]"


async def test_media_that_does_not_come_ends_with_the_deadline_of_its_request(started: Started) -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    slow = Fetcher(HOSTS, 1000, resolve=never)
    part = {"type": "image_url", "image_url": {"url": "https://media.example/a"}}
    async with started(echo, model=SPEC, fetcher=slow) as api:
        body = {"messages": [{"role": "user", "content": [part]}], "timeout_s": 0.2}
        answer = await api.client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
