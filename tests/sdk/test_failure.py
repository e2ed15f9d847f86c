"""Errors of the client: one class per kind of response, the api's messages, and retries."""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mstar_core.client import (
    AuthError,
    BadRequestError,
    ClientError,
    ConflictError,
    MStarClient,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    Stream,
    StreamError,
    UnavailableError,
)
from mstar_core.client.calls import generate_call, get_call
from mstar_core.client.errors import like_requests, retry_delay_s
from mstar_core.client.http import Http, SyncSession
from mstar_core.client.streams import AsyncStream
from mstar_core.client.sync_client import run
from mstar_core.errors import ExitCode, MstarError
from tests.fakes.conductor import begin
from tests.sdk.conftest import any_api, in_thread

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer, **options: Any) -> MStarClient:
    return MStarClient("http://api", session=httpx.Client(transport=httpx.MockTransport(answer)), **options)


@pytest.mark.parametrize(
    ("status", "kind", "exit_code"),
    [
        (400, BadRequestError, ExitCode.USAGE),
        (401, AuthError, ExitCode.REFUSED),
        (403, AuthError, ExitCode.REFUSED),
        (404, BadRequestError, ExitCode.NOT_FOUND),
        (408, BadRequestError, ExitCode.USAGE),
        (409, ConflictError, ExitCode.USAGE),
        (413, BadRequestError, ExitCode.USAGE),
        (415, BadRequestError, ExitCode.USAGE),
        (422, BadRequestError, ExitCode.USAGE),
        (429, OverloadedError, ExitCode.UNREACHABLE),
        (499, RequestCancelledError, ExitCode.CANCELLED),
        (500, ClientError, ExitCode.INTERNAL),
        (503, UnavailableError, ExitCode.UNREACHABLE),
        (504, RequestTimeoutError, ExitCode.TIMED_OUT),
    ],
)
def test_each_status_has_its_class_and_keeps_the_message_of_the_api(
    status: int, kind: type[ClientError], exit_code: ExitCode
) -> None:
    body = {"detail": "no", "error": {"message": "voice is x", "type": "t", "code": "some_code", "param": "voice"}}
    answer = httpx.Response(status, json=body, headers={"Retry-After": "7", "X-Request-ID": "r-1"})
    with client(lambda request: answer) as api, pytest.raises(ClientError) as caught:
        api.generate(text="hi")
    error = caught.value
    assert isinstance(error, kind) and isinstance(error, MstarError)
    assert (error.title, error.code, error.param, error.status) == ("voice is x", "some_code", "voice", status)
    assert (error.request_id, error.retry_after, error.exit_code) == ("r-1", 7.0, exit_code)
    assert error.response is not None and error.response.json() == body


def test_a_response_without_json_is_an_error() -> None:
    with client(lambda request: httpx.Response(502, content=b"<html>bad gateway")) as api:
        with pytest.raises(ClientError, match="bad gateway") as caught:
            api.generate(text="hi")
    assert (caught.value.status, caught.value.param) == (502, None)
    with client(lambda request: httpx.Response(307)) as api, pytest.raises(ClientError, match="answered 307"):
        api.generate(text="hi")


async def test_errors_of_a_real_api() -> None:
    def failure(work: Callable[[MStarClient], object], **options: Any) -> Any:
        async def run() -> ClientError:
            with pytest.raises(ClientError) as caught:
                await in_thread(work, api.url, **options)
            return caught.value

        return run()

    async with any_api(api_keys=("secret",)) as api:
        assert isinstance(await failure(lambda c: c.models()), AuthError)
        assert await in_thread(lambda c: len(c.models()), api.url, api_key="secret") == 1
        missing = await failure(lambda c: c.generate(), api_key="secret")
        assert isinstance(missing, BadRequestError) and (missing.code, missing.param) == ("missing_field", "text")
        unknown = await failure(lambda c: c.generate(text="hi", colour=1), api_key="secret")
        assert (unknown.code, unknown.param) == ("unknown_parameter", "colour")
        nowhere = await failure(lambda c: c.transcribe(b"RIFF"), api_key="secret")
        assert (nowhere.status, nowhere.code) == (404, "unsupported_endpoint")
        late = await failure(lambda c: c.generate(text="hang", timeout_s=0.2), api_key="secret")
        assert isinstance(late, RequestTimeoutError) and late.code == "timeout" and late.request_id


async def test_a_request_id_in_flight_is_a_conflict_and_a_full_queue_gives_a_retry_time() -> None:
    def work(url: str) -> tuple[ClientError, ClientError]:
        with MStarClient(url) as one:
            stream = one.stream(text="hi", output_modalities="audio", request_id="mine")
            next(stream)
            with pytest.raises(ConflictError) as conflict:
                one.generate(text="hi", request_id="mine")
            with one.stream(text="hi", output_modalities="audio"), pytest.raises(OverloadedError) as full:
                one.stream(text="hi", output_modalities="audio")
            return conflict.value, full.value

    async with any_api(begin, max_concurrent_requests=2, max_queue=0) as api:
        conflict, full = await asyncio.to_thread(work, api.url)
    assert (conflict.code, conflict.param) == ("request_id_in_use", "request_id")
    assert full.code == "queue_full" and full.retry_after is not None and 1 <= full.retry_after <= 60


@contextmanager
def nobody() -> Iterator[str]:
    """Yield an address where nothing listens. Its port stays bound, so that no other process takes it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_address_without_a_server_is_unreachable() -> None:
    with (
        nobody() as url,
        MStarClient(url) as api,
        pytest.raises(UnavailableError, match="nothing answers at http://127") as caught,
    ):
        api.generate(text="hi")
    assert (caught.value.code, caught.value.status, caught.value.response) == ("unreachable", 503, None)


def test_a_silent_server_times_out() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with (
            MStarClient(url, timeout=0.2, retries=3) as api,
            pytest.raises(RequestTimeoutError, match=r"nothing for 0\.2 s") as it,
        ):
            api.generate(text="hi")
        assert it.value.code == "silent"
        server.accept()[0].close()
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()  # it may have begun, so it is not sent again


class Tries:
    """A server that gives its responses in order and repeats the last. waited: the sleeps of the client."""

    def __init__(self, *answers: httpx.Response | Exception, retries: int) -> None:
        self.answers = list(answers)
        self.waited: list[float] = []
        self.bodies: list[bytes] = []
        session = httpx.Client(transport=httpx.MockTransport(self.answer))
        self.http = Http(SyncSession(session, self.waited.append), "http://api", timeout_s=1, retries=retries)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.read())
        item = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(item, Exception):
            raise item
        return item


OK = httpx.Response(200, json={})
FULL = httpx.Response(429, headers={"Retry-After": "7"}, json={})
STARTING = httpx.Response(503, headers={"Retry-After": "5"}, json={})
BARE = httpx.Response(503, content=b"upstream")
NO_ROUTE = httpx.ConnectError("refused")


def test_a_request_that_has_not_started_is_retried_after_the_delay_of_the_server() -> None:
    tries = Tries(NO_ROUTE, FULL, STARTING, BARE, OK, retries=4)
    call = generate_call(text="hi", images=b"\x89PNG", model_kwargs={})
    assert run(tries.http.fetch(call)).status_code == 200
    assert tries.waited == [0.5, 7.0, 5.0, 4.0]
    assert len(tries.bodies) == 5 and all(b"\x89PNG" in body for body in tries.bodies)


def test_without_retries_and_once_they_are_used_up_the_error_is_the_last_one() -> None:
    for retries, count in ((0, 1), (2, 3)):
        tries = Tries(FULL, retries=retries)
        with pytest.raises(OverloadedError):
            run(tries.http.fetch(get_call("/x")))
        assert len(tries.bodies) == count


@pytest.mark.parametrize(
    "what",
    [
        httpx.ReadError("reset"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("closed"),
        httpx.WriteError("reset"),
        *(httpx.Response(status, headers={"Retry-After": "1"}, json={}) for status in (400, 409, 499, 500, 504)),
    ],
    ids=str,
)
def test_a_request_that_may_have_started_is_never_retried(what: httpx.Response | Exception) -> None:
    tries = Tries(what, retries=5)
    with pytest.raises(ClientError):
        run(tries.http.fetch(get_call("/x")))
    assert len(tries.bodies) == 1 and tries.waited == []


async def test_a_full_queue_of_a_real_api_is_retried() -> None:
    waited: list[float] = []

    def work(url: str) -> None:
        with MStarClient(url) as one:
            first = one.stream(text="hi", output_modalities="audio")
            next(first)

            def sleep(seconds: float) -> None:
                waited.append(seconds)
                loop.call_soon_threadsafe(lambda: api.fake.finish(api.fake.requests[0].handle))
                list(first)

            http = Http(SyncSession(sleep=sleep), url, timeout_s=60, retries=9)
            with Stream(AsyncStream(http, run(http.open(second)), "raise")) as stream:
                next(stream)
            run(http.session.close())

    loop = asyncio.get_running_loop()
    second = generate_call(text="hi", output_modalities="audio", stream=True, model_kwargs={})
    async with any_api(begin, max_concurrent_requests=1, max_queue=0) as api:
        await asyncio.to_thread(work, api.url)
        assert waited and all(1 <= seconds <= 60 for seconds in waited)
        assert len(api.fake.requests) == 2


def test_delays_double_up_to_a_limit() -> None:
    error = UnavailableError("x", status=503, code="unreachable")
    assert [retry_delay_s(error, attempt, 7) for attempt in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, None]


def test_errors_are_also_those_of_requests_if_it_is_loaded() -> None:
    import requests  # of the development requirements

    body = {"error": {"message": "no", "code": "c", "param": None}}
    with client(lambda request: httpx.Response(429, json=body)) as api:
        with pytest.raises(requests.HTTPError) as caught:
            api.generate(text="hi")
    error = caught.value
    assert isinstance(error, OverloadedError) and error.response.status_code == 429 and error.response.json() == body
    with nobody() as url, MStarClient(url) as api, pytest.raises(requests.ConnectionError) as gone:
        api.generate(text="hi")
    assert isinstance(gone.value, UnavailableError) and gone.value.code == "unreachable"
    with (
        client(lambda request: httpx.Response(200, content=b"")) as api,
        pytest.raises(requests.RequestException) as cut,
    ):
        list(api.stream(text="hi"))
    assert isinstance(cut.value, StreamError)


def test_without_requests_the_classes_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "requests", raising=False)
    assert like_requests(OverloadedError, "HTTPError") is OverloadedError


def test_an_error_can_be_pickled() -> None:
    answer = httpx.Response(429, json={"error": {"message": "full", "code": "queue_full", "param": "x"}})
    with client(lambda request: answer) as api, pytest.raises(OverloadedError) as caught:
        api.generate(text="hi")
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
    assert type(again) is OverloadedError and str(again) == str(caught.value)
    assert (again.status, again.code, again.param, again.response) == (429, "queue_full", "x", None)
