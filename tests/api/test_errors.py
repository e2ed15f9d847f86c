"""Every error status that a client can encounter before anything runs, its format, and that nothing leaks."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from mstar_core.api.http.strict_json import parse_json
from mstar_core.errors import RequestError
from mstar_core.messages.life import Drained, ServiceState
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import LIMITS, Api, Started, running
from tests.fakes.conductor import FakeDeployment, speak

GOOD = {"text": "x", "output_modalities": "audio"}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error object, after checks that hold for every error of every route."""
    for leak in ("Traceback", "/secret", "/etc", ".py", "site-packages"):
        assert leak not in answer.text, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return error


BAD_FORMS = [
    ({"text": "x", "model_kwargs": "{"}, 400, "invalid_json", "model_kwargs"),
    ({"text": "x", "model_kwargs": '{"a":1,"a":2}'}, 400, "invalid_json", "model_kwargs"),
    ({"text": "x", "model_kwargs": '{"temperature": NaN}'}, 400, "invalid_json", "model_kwargs"),
    ({"text": "x", "model_kwargs": "[1]"}, 400, "invalid_json", "model_kwargs"),
    ({"text": "x", "model_kwargs": '{"temperature": "hot"}'}, 400, "invalid_value", "temperature"),
    ({"text": "x", "temperature": "9"}, 400, "invalid_value", "temperature"),
    ({"text": "x", "temperature": "nan"}, 400, "invalid_value", "temperature"),
    ({"text": "x", "temperature": "9" * 500}, 400, "invalid_value", "temperature"),
    ({"text": "x", "voice": "nobody"}, 400, "invalid_value", "voice"),
    ({"text": "x", "temprature": "1"}, 400, "unknown_parameter", "temprature"),
    ({"text": "x", "seed": "-1"}, 400, "invalid_value", "seed"),
    ({"text": "x", "seed": str(2**63)}, 400, "invalid_value", "seed"),
    ({"text": "x", "stop": ""}, 400, "invalid_value", "stop"),
    ({"text": "x", "timeout_s": "0"}, 400, "invalid_value", "timeout_s"),
    ({"text": "x", "timeout_s": "soon"}, 400, "invalid_value", "timeout_s"),
    ({"text": "x", "priority": "high"}, 400, "invalid_value", "priority"),
    ({"text": "x", "streaming": "maybe"}, 400, "invalid_value", "streaming"),
    ({"text": "x", "streaming": "1", "stream": "1"}, 400, "invalid_value", "stream"),
    ({"text": "x", "stream_events": "some"}, 400, "invalid_value", "stream_events"),
    ({"text": "x", "request_id": "a b"}, 400, "invalid_value", "request_id"),
    ({"text": "x", "request_id": "a/b"}, 400, "invalid_value", "request_id"),
    ({"text": "x", "request_id": "x" * 129}, 400, "invalid_value", "request_id"),
    ({"text": "x", "output_modalities": "smell"}, 400, "unknown_modality", "output_modalities"),
    ({"text": "x", "output_modalities": "video"}, 400, "unknown_modality", "output_modalities"),
    ({"text": "x", "input_modalities": "text,text"}, 400, "invalid_value", "input_modalities"),
    ({"text": "x", "input_modalities": "audio"}, 400, "unknown_modality", "input_modalities"),
    ({"text": "x", "files": "none"}, 400, "invalid_value", "files"),
    ({"text": ""}, 400, "missing_field", "text"),
    ({"text": " \n"}, 400, "missing_field", "text"),
    ({"text": "y" * 1001}, 400, "context_length_exceeded", "text"),
    ({"text": "y" * 4096}, 413, "body_too_large", "text"),
]


async def test_bad_forms_are_refused_naming_the_field() -> None:
    async with running(speak(1), max_text_bytes=4000) as api:
        for form, status, code, param in BAD_FORMS:
            answer = await api.client.post("/generate", data=form)
            error = error_of(answer)
            assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (form, error)
            assert error["type"] == "invalid_request_error"
            assert answer.json()["detail"] == error["message"]
        assert not api.fake.requests
        await api.clean()
        assert (await api.client.post("/generate", data=GOOD)).status_code == 200


BAD_BODIES = [
    (b"{", "application/json", 400, "invalid_json"),
    (b"[]", "application/json", 400, "invalid_json"),
    (b'{"text":"\\ud800"}', "application/json", 400, "invalid_json"),
    (b'{"text":"x","model_kwargs":' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}", "application/json", 400, "invalid_json"),
    (b"[" * 100_000, "application/json", 400, "invalid_json"),
    (b'{"seed":' + b"9" * 5000 + b"}", "application/json", 400, "invalid_json"),
    (b"\xff", "application/json", 400, "invalid_json"),
    (b'{"text": 5}', "application/json", 400, "invalid_value"),
    (b'{"text":"x","files":[{"data":"%%%"}]}', "application/json", 400, "invalid_value"),
    (b"text=%ff", "application/x-www-form-urlencoded", 400, "invalid_form"),
    (b"text", "application/x-www-form-urlencoded", 400, "invalid_form"),
    (b"text=a&text=b", "application/x-www-form-urlencoded", 400, "invalid_value"),
    (b"x", "text/plain", 415, "unsupported_content_type"),
    (b"x", "", 415, "unsupported_content_type"),
    (b"x", "multipart/form-data", 400, "invalid_multipart"),
    (b"x", "multipart/form-data; boundary=b", 400, "invalid_multipart"),
]


async def test_bad_bodies_are_refused() -> None:
    async with running(speak(1)) as api:
        for body, kind, status, code in BAD_BODIES:
            answer = await api.client.post("/generate", content=body, headers={"Content-Type": kind})
            assert (answer.status_code, error_of(answer)["code"]) == (status, code), body[:50]
        await api.clean()


async def test_an_upload_that_is_cut_anywhere_never_runs() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\nhi\r\n'
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n\x89PNG\r\n\x1a\n\r\n--b--'
    )
    async with running(speak(1)) as api:
        for cut in range(0, len(body), 7):
            answer = await api.client.post(
                "/generate", content=body[:cut], headers={"Content-Type": "multipart/form-data; boundary=b"}
            )
            assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_multipart"), cut
        assert not api.fake.requests


async def test_files_of_no_use_are_refused() -> None:
    async with running(speak(1), max_files=2, max_body_bytes=100_000) as api:

        async def send(*datas: bytes) -> tuple[int, str]:
            files = [("files", (f"f{i}", data)) for i, data in enumerate(datas)]
            answer = await api.client.post("/generate", data=GOOD, files=files)
            return answer.status_code, error_of(answer)["code"]

        assert await send(b"what is this") == (415, "unsupported_media_type")
        assert await send(b"fLaC" + bytes(9)) == (415, "unsupported_media_type")
        assert await send(b"BM", b"BM", b"BM") == (413, "too_many_files")
        assert await send(b"BM" + bytes(200_000)) == (413, "body_too_large")
        named = await api.client.post("/generate", data=GOOD, files={"photo": ("a", b"BM")})
        assert (named.status_code, error_of(named)["param"]) == (400, "photo")


async def test_paths_and_verbs() -> None:
    async with running(speak(1)) as api:
        missing = await api.client.get("/v1/nothing")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
        verb = await api.client.get("/generate")
        assert (verb.status_code, error_of(verb)["code"]) == (405, "method_not_allowed")
        assert (await api.client.head("/generate")).status_code == 405
        for path in ("/health", "/v1/models", "/openapi.json", "/docs"):
            whole, head = await api.client.get(path), await api.client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            for name in ("content-type", "content-length"):
                assert head.headers[name] == whole.headers[name], path
        assert (await api.client.head("/v1/nothing")).status_code == 404
        chat = await api.client.post("/v1/chat/completions", json={})
        assert (chat.status_code, error_of(chat)["code"]) == (404, "unsupported_endpoint")
        assert "/v1/audio/speech" in error_of(chat)["message"]
        unknown = await api.client.post("/v1/requests/nobody/cancel")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "request_not_found")
        assert (await api.client.get("/v1/models/zzz")).status_code == 404


async def test_keys_are_needed_where_they_are_set_and_hide_others_requests() -> None:
    async with running(speak(1), api_keys=("k1", "k2")) as api:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic k1"}, {"X-API-Key": "k"}):
            answer = await api.client.post("/generate", data=GOOD, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
            assert error_of(answer)["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        mine = {"Authorization": "Bearer k1", "X-Request-ID": "r"}
        assert (await api.client.post("/generate", data=GOOD, headers=mine)).status_code == 200
        assert (await api.client.get("/v1/requests/r", headers={"X-API-Key": "k1"})).status_code == 200
        assert (await api.client.get("/v1/requests/r", headers={"Authorization": "Api-Key k2"})).status_code == 404
        assert (await api.client.get("/metrics")).status_code == 401
        assert (await api.client.get("/health")).status_code == 200


async def test_without_keys_any_authorization_is_ignored(started: Started) -> None:
    async with started(speak(1)) as api:
        assert (await api.client.post("/generate", data=GOOD, headers={"Authorization": "Bearer x"})).status_code == 200


async def test_another_models_name_is_refused_only_when_strict(started: Started) -> None:
    async with started(speak(1)) as api:
        assert (await api.client.post("/generate", data={**GOOD, "model": "other"})).status_code == 200
    async with started(speak(1), strict_model=True) as api:
        answer = await api.client.post("/generate", data={**GOOD, "model": "other"})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
        for name in ("fake", "fake_speech", "fake/weights"):
            assert (await api.client.post("/generate", data={**GOOD, "model": name})).status_code == 200


async def test_a_model_has_the_names_of_its_deployment_too(started: Started) -> None:
    async with started(speak(1), strict_model=True, aliases=("voice-1",)) as api:
        assert (await api.client.post("/generate", data={**GOOD, "model": "voice-1"})).status_code == 200
        assert (await api.client.get("/v1/models/voice-1")).json()["aliases"][0] == "voice-1"
        assert (await api.client.get("/v1/models/voice-2")).status_code == 404
    async with started(speak(1), strict_model=True, aliases=("*",)) as api:
        assert (await api.client.post("/generate", data={**GOOD, "model": "whatever"})).status_code == 200
        card = (await api.client.get("/v1/models/whatever")).json()
        assert card["id"] == "fake" and "*" not in card["aliases"]


async def test_unknown_parameters_may_be_a_warning(started: Started) -> None:
    async with started(speak(1), unknown_params="warn") as api:
        answer = await api.client.post("/generate", data={**GOOD, "colour": "red"})
        assert "colour" in answer.headers["x-mstar-warnings"]


async def test_an_id_in_flight_is_refused_and_free_again_afterwards(started: Started) -> None:
    async with started() as api:
        first = asyncio.create_task(api.client.post("/generate", data={**GOOD, "request_id": "same"}))
        request = await api.fake.next_request()
        second = await api.client.post("/generate", data={**GOOD, "request_id": "same"})
        assert (second.status_code, error_of(second)["code"]) == (409, "request_id_in_use")
        api.fake.audio(request.handle)
        api.fake.finish(request.handle)
        assert (await first).status_code == 200
        api.fake.script = speak(1)
        assert (await api.client.post("/generate", data={**GOOD, "request_id": "same"})).status_code == 200
        assert len({request.handle for request in api.fake.requests}) == 2


UPLOAD = (
    "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX-Request-ID: up\r\n"
    "Content-Length: 1000\r\n\r\n{"
)


async def test_a_request_is_cancelled_by_the_id_of_its_header_while_its_body_comes(started: Started) -> None:
    async with started(speak(1), api_keys=("k1", "k2")) as api:
        key = hashlib.sha256(b"k1").hexdigest()
        reader, writer = await asyncio.open_connection("127.0.0.1", api.process.port)
        writer.write(UPLOAD.replace("Host: 127.0.0.1", "Host: 127.0.0.1\r\nX-API-Key: k1").encode())
        await api.until(lambda: api.process.registry.arrives("up", key) is not None)
        mine, other = {"X-API-Key": "k1"}, {"X-API-Key": "k2"}
        assert (await api.client.get("/v1/requests/up", headers=mine)).json()["status"] == "preprocessing"
        assert (await api.client.post("/v1/requests/up/cancel", headers=other)).status_code == 404
        told = await api.client.post("/v1/requests/up/cancel", headers=mine)
        assert told.json() == {"id": "up", "status": "cancelled"}
        assert (await reader.readline()).split()[1] == b"499"
        assert (await api.client.post("/v1/requests/up/cancel", headers=mine)).json()["status"] == "cancelled"
        writer.close()
        again = await api.client.post("/generate", data=GOOD, headers={**mine, "X-Request-ID": "up"})
        assert again.status_code == 200
        assert api.process.registry.arrives("up", key) is None
        assert len(api.fake.requests) == 1


async def fill(api: Api, count: int) -> list[asyncio.Task[httpx.Response]]:
    tasks = [asyncio.create_task(api.client.post("/generate", data=GOOD)) for _ in range(count)]
    await api.until(lambda: len(api.process.registry) >= count)
    return tasks


async def test_beyond_the_queue_requests_are_refused_with_a_time_to_wait(started: Started) -> None:
    async with started(max_concurrent_requests=2, max_queue=3) as api:
        tasks = await fill(api, 5)
        await api.fake.next_request(2)
        over = await api.client.post("/generate", data=GOOD)
        assert (over.status_code, error_of(over)["code"]) == (429, "queue_full")
        assert error_of(over)["type"] == "rate_limit_error"
        assert 1 <= int(over.headers["retry-after"]) <= 60
        assert len(api.fake.requests) == 2
        api.fake.script = speak(1)
        for request in api.fake.requests[:2]:
            speak(1)(api.fake, request)
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
        await api.clean()


async def test_two_hundred_at_once_on_a_queue_of_eight_are_served_or_refused(started: Started) -> None:
    async with started(speak(1), max_concurrent_requests=4, max_queue=8) as api:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=api.url, limits=limits, timeout=60) as client:
            answers = await asyncio.gather(*(client.post("/generate", data=GOOD) for _ in range(200)))
        statuses = {answer.status_code for answer in answers}
        assert statuses <= {200, 429} and 200 in statuses
        await api.clean()


async def test_a_deadline_covers_the_queue(started: Started) -> None:
    async with started(max_concurrent_requests=1) as api:
        blocker = (await fill(api, 1))[0]
        await api.fake.next_request()
        answer = await api.client.post("/generate", data={**GOOD, "timeout_s": "0.05"})
        assert (answer.status_code, error_of(answer)["code"]) == (504, "timeout")
        assert len(api.fake.requests) == 1
        speak(1)(api.fake, api.fake.requests[0])
        assert (await blocker).status_code == 200
        await api.clean()


async def test_a_deadline_before_the_first_byte_is_a_504_and_cancels(started: Started) -> None:
    async with started() as api:
        for limit in LIMITS:
            answer = await api.client.post("/generate", data={**GOOD, "timeout_s": str(limit)})
            assert (answer.status_code, error_of(answer)["code"]) == (504, "timeout")
            await api.clean()
            if api.fake.requests:
                break
        await api.fake.until(lambda: [c.why for c in api.fake.cancels] == ["deadline"])


async def test_before_it_is_ready_requests_are_refused_and_probes_say_why(started: Started) -> None:
    async with started(speak(1), ready=False) as api:
        answer = await api.client.post("/generate", data=GOOD)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "starting")
        assert answer.headers["retry-after"]
        assert (await api.client.get("/health")).json()["status"] == "starting"
        assert (await api.client.get("/ready")).status_code == 503
        await api.ready()
        assert (await api.client.get("/health")).json() == {"status": "healthy"}
        assert (await api.client.get("/ready")).json() == {"status": "ready", "model": "fake"}
        assert (await api.client.post("/generate", data=GOOD)).status_code == 200


@pytest.mark.parametrize(
    "text, status, code",
    [("kill", 422, "undecodable_media"), ("raise", 500, "plugin_error"), ("memory", 500, "plugin_error")],
)
async def test_a_processor_that_fails_costs_its_request_alone(text: str, status: int, code: str) -> None:
    async with running(speak(1), pool_processes=1) as api:
        answer = await api.client.post("/generate", data={**GOOD, "text": text})
        assert (answer.status_code, error_of(answer)["code"]) == (status, code)
        assert "secret" not in answer.text
        assert (await api.client.post("/generate", data=GOOD)).status_code == 200
        await api.clean()


async def test_a_failure_of_the_engine_is_told_with_its_status(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.fail(request.handle, "out_of_memory", 500, "node LLM has no pages left")

    async with started(script) as api:
        for form in (GOOD, {**GOOD, "streaming": "false"}):
            answer = await api.client.post("/generate", data=form)
            assert (answer.status_code, error_of(answer)["code"]) == (500, "out_of_memory")
        assert not api.fake.cancels


async def test_draining_refuses_new_requests_and_tells_when_the_last_is_over(started: Started) -> None:
    async with started() as api:
        task = (await fill(api, 1))[0]
        request = await api.fake.next_request()
        api.fake.tell(ServiceState(state="draining", drain=1))
        await api.until(lambda: api.process.link.deployment.is_draining)
        answer = await api.client.post("/generate", data=GOOD)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "draining")
        assert not [m for _, m in api.fake.received if type(m).__name__ == "Drained"]
        speak(1)(api.fake, request)
        assert (await task).status_code == 200
        await api.fake.until(lambda: any(type(m).__name__ == "Drained" for _, m in api.fake.received))
        api.fake.tell(ServiceState(state="ready"))
        await api.until(lambda: not api.process.link.deployment.is_draining)
        await api.ready()


async def test_an_api_that_starts_during_a_drain_reports_it_at_once(started: Started) -> None:
    async with started(ready=False) as api:
        api.fake.tell(ServiceState(state="draining", drain=3))
        await api.fake.until(lambda: [message.drain for message in api.fake.of(Drained)] == [3])
        answer = await api.client.post("/generate", data=GOOD)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "draining")


async def test_the_port_may_open_only_when_the_deployment_is_ready(started: Started) -> None:
    async with started(speak(1), ready=False, bind_when_ready=True) as api:
        with pytest.raises(httpx.ConnectError):
            await api.client.get("/health")
        await api.ready()
        await api.until(lambda: api.process.is_serving)
        assert (await api.client.get("/ready")).status_code == 200


async def test_json_files_over_the_count_are_refused(started: Started) -> None:
    async with started(speak(1), max_files=1) as api:
        file = {"data": base64.b64encode(b"BM").decode()}
        answer = await api.client.post("/generate", json={"text": "x", "files": [file, file]})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "too_many_files")


ODD_WORDS = {"trace": "Traceback", "file": 'File "x"', "line": "a\nb", "long": "k" * 3_000_000}


@pytest.mark.parametrize("word", ODD_WORDS.values(), ids=ODD_WORDS)
async def test_words_of_the_client_in_a_refusal_stay_a_short_refusal(started: Started, word: str) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.post("/generate", json={"text": "x", word: 1})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unknown_parameter")
        assert len(error["message"]) <= 1000 and len(error["param"]) <= 200 and "\n" not in error["message"]
        if len(word) < 100:
            assert (await api.client.get(f"/{quote(word)}")).status_code == 404


async def test_errors_before_a_handler_have_its_form_and_the_clients_id(started: Started) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.get("/generate", headers={"X-Request-ID": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (405, "mine")
        assert answer.json()["detail"] == answer.json()["error"]["message"]
        other = await api.client.get("/nowhere", headers={"X-Request-ID": "mine"})
        assert (other.status_code, other.headers["x-request-id"], set(other.json())) == (404, "mine", {"error"})


async def test_ids_and_models_are_found_under_escaped_names(started: Started) -> None:
    async with started(speak(1)) as api:
        name = 'a#b%c?d"e'
        await api.client.post("/generate", data={**GOOD, "request_id": name})
        path = f"/v1/requests/{quote(name, safe='')}"
        assert (await api.client.get(path)).json()["id"] == name
        assert (await api.client.post(f"{path}/cancel")).json() == {"id": name, "status": "finished"}
        assert (await api.client.get("/v1/models/fake%5Fspeech")).status_code == 200


@pytest.mark.parametrize("over", [0, 1])
async def test_a_text_of_a_json_body_has_the_limit_of_one_in_a_form(started: Started, over: int) -> None:
    text = "\u00e4" * 500 + "x" * over  # 1000 bytes, and one more
    async with started(speak(1), max_text_bytes=1000) as api:
        for answer in (
            await api.client.post("/generate", json={"text": text, "output_modalities": "audio"}),
            await api.client.post("/generate", data={"text": text, "output_modalities": "audio"}),
        ):
            assert answer.status_code == (413 if over else 200)


def test_a_body_of_millions_of_small_values_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar_core.api.http.strict_json.MAX_VALUES", 100)
    assert len(parse_json(b"[" + b"{}," * 99 + b"{}]")) == 100
    with pytest.raises(RequestError, match="more than 100 values"):
        parse_json(b"[" + b"{}," * 100 + b"{}]")
