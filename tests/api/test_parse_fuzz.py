"""Hostile bodies, uploads and parameters: refused with a 4xx, never a crash, and nothing leaks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from httpx._multipart import MultipartStream
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mstar_core.api.routes.fields import typed
from mstar_core.api.schema import ChatRequest
from mstar_core.errors import RequestError
from mstar_core.plugin.params import parse_params
from tests.api.live import LiveApi, live_api
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC, Params

QUICK = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)

CHAT, GENERATE, EDIT = "/v1/chat/completions", "/generate", "/v1/images/edits"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FILES = {
    "png": media.image(40, 30),
    "jpeg": media.image(40, 30, "JPEG"),
    "webp": media.image(40, 30, "WEBP"),
    "gif": media.image(40, 30, "GIF"),
    "tiff": media.image(40, 30, "TIFF"),
    "bmp": media.image(40, 30, "BMP"),
    "wav": media.wav(0.2),
    "flac": media.coded("flac", "flac"),
    "mp3": media.coded("mp3", "libmp3lame"),
    "ogg": media.coded("ogg", "libopus"),
    "m4a": media.coded("ipod", "aac"),
    "aac": media.coded("adts", "aac"),
    "mp4": media.video(),
    "mkv": media.video(form="matroska"),
    "avi": media.video(form="avi"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveApi]:
    with live_api(echo, SPEC) as live:
        yield live


@pytest.fixture(autouse=True)
def still_serves(server: LiveApi) -> Iterator[None]:
    yield
    server.assert_good()


def sent(request: httpx.Request) -> str:
    """Return the address and body of a request; an upload that was streamed counts as empty."""
    body = b"" if isinstance(request.stream, MultipartStream) else request.content
    return str(request.url) + body.decode(errors="replace")


def refused_or_served(answer: httpx.Response) -> None:
    """Check that the response is not a server error and reveals no internals. What the request held may come back."""
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    for leak in ("Traceback", "site-packages", "/tmp/", ".py"):
        assert leak in sent(answer.request) or leak not in answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@QUICK
@given(data=st.binary(max_size=200), path=st.sampled_from([CHAT, GENERATE, "/v1/audio/speech"]))
def test_any_bytes_as_json(data: bytes, path: str, server: LiveApi) -> None:
    refused_or_served(server.client.post(path, content=data, headers={"Content-Type": "application/json"}))


@QUICK
@given(body=JSON)
def test_any_json_as_a_chat(body: Any, server: LiveApi) -> None:
    text = json.dumps({"messages": body} if not isinstance(body, dict) else {**body, "messages": [body]})
    refused_or_served(server.client.post(CHAT, content=text, headers={"Content-Type": "application/json"}))


@QUICK
@given(name=st.sampled_from(sorted(ChatRequest.__struct_fields__)), value=JSON)
def test_any_value_in_any_field_of_a_chat(name: str, value: Any, server: LiveApi) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], name: value}
    refused_or_served(server.client.post(CHAT, content=json.dumps(body), headers={"Content-Type": "application/json"}))


@QUICK
@given(text=st.text(max_size=200))
def test_any_text_comes_back_whole(text: str, server: LiveApi) -> None:
    answer = server.client.post(CHAT, json={"messages": [{"role": "user", "content": text}]})
    refused_or_served(answer)
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["message"]["content"] == f"<user>{text}<assistant>"


PARTS = (
    b"--b\r\n",
    b"--b--\r\n",
    b"--c\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b'Content-Disposition: form-data; name="text"\r\n',
    b'Content-Disposition: form-data; name="files"; filename="../../etc/passwd"\r\n',
    b"Content-Disposition: x\r\n",
    b'Content-Disposition: form-data; name="image"; filename="\x00.png"\r\n',
    b"Content-Type: image/png\r\n",
    b"Content-Transfer-Encoding: base64\r\n",
    b'Content-Disposition: form-data; name="prompt"\r\n',
    b"\xff\xfe",
    b"hi",
    FILES["png"],
    b"-" * 100,
)


@QUICK
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), path=st.sampled_from([GENERATE, EDIT]))
def test_any_pieces_of_a_multipart_body(parts: list[bytes], path: str, server: LiveApi) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    refused_or_served(server.client.post(path, content=b"".join(parts), headers=headers))


@QUICK
@given(kind=st.text(max_size=60).filter(lambda text: text.isascii() and text.isprintable()).map(str.rstrip))
def test_any_content_type(kind: str, server: LiveApi) -> None:
    headers = {"Content-Type": f"multipart/form-data; boundary={kind}"}
    refused_or_served(server.client.post(GENERATE, content=b"--x\r\n\r\n--x--", headers=headers))


@QUICK
@given(name=st.sampled_from(sorted(FILES)), seed=st.integers(0, 10**6), count=st.integers(1, 30))
def test_damaged_files_of_every_kind(name: str, seed: int, count: int, server: LiveApi) -> None:
    random_numbers = random.Random(seed)
    data = bytearray(FILES[name])
    for _ in range(count):
        data[random_numbers.randrange(8, len(data))] = random_numbers.randrange(256)
    if seed % 3 == 0:
        del data[random_numbers.randrange(9, len(data)) :]
    answer = server.client.post(
        GENERATE, data={"text": "x", "streaming": "false"}, files={"files": (name, bytes(data))}
    )
    refused_or_served(answer)
    assert answer.status_code in (200, 413, 415, 422)


@QUICK
@given(url=st.text(max_size=60) | st.from_regex(r"(data|https?|file|ftp):.{0,40}", fullmatch=True))
def test_any_url_as_an_image(url: str, server: LiveApi) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = server.client.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    refused_or_served(answer)
    assert answer.status_code != 200


@settings(max_examples=150, deadline=None)
@given(given_=st.dictionaries(st.sampled_from([*Params.__dataclass_fields__, "stop", "x"]), JSON, max_size=3))
def test_any_parameters_are_in_range_or_refused_by_name(given_: dict[str, Any]) -> None:
    try:
        made = parse_params(Params, given_).params
    except RequestError as error:
        assert error.field is not None
        return
    assert 0 <= made.temperature <= 2 and made.max_output_tokens >= 1 and made.voice in ("ethan", "chelsie")


@settings(max_examples=150, deadline=None)
@given(body=st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__), JSON))
def test_any_fields_of_a_chat_are_typed_or_refused_by_name(body: dict[str, Any]) -> None:
    try:
        asked, _ = typed(body, ChatRequest)
    except RequestError as error:
        assert error.status == 400
        return
    assert asked.n >= 1 and asked.messages
