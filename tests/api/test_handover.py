"""A response whose process dies at any write ends as one valid response, however the repeated request goes.

The client has read an arbitrary part of the bytes. Whatever the second process does with the request, what it sends
must continue exactly these bytes: whole chunks, whole events, one end, and no output that differs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pytest

from mstar_core.messages.requests import NewRequest
from tests.api.conftest import LIMIT_S, Api, running
from tests.api.handed_over import Continued, Moment, Wire, first_process, second_process
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import SPEC

PATIENCE: Final = 20
"""Milliseconds for the bytes of an output; some have none."""

IS_COMPLETE: Final = os.environ.get("MSTAR_CUTS") == "1"
SAY: Final = [{"role": "user", "content": "hi"}]
FULL: Final = {"text": "x", "stream_events": "full", "request_id": "name"}
NOISE: Final = np.random.default_rng(1).integers(0, 255, (100, 100, 3), dtype=np.uint8)
"""An image that does not compress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of response. what: its request. outputs: modality and array of each output, in order.

    items: requests that it makes. is_sound: it is a file of sound, which cannot have an error in it. version: of HTTP.
    """

    what: dict[str, Any]
    outputs: tuple[tuple[str, Any], ...]
    items: int = 1
    is_sound: bool = False
    version: str = "1.1"


def text(data: bytes) -> tuple[str, Any]:
    """Output of ids, one for each byte."""
    return "text", np.frombuffer(data, np.uint8).astype(np.int64)


def sound(samples: int) -> tuple[str, Any]:
    """Output of sound. Much of it is written in several parts."""
    return "audio", np.arange(samples, dtype=np.int16)


TEXT: Final = (text(b"one "), text("\N{SNOWMAN}".encode()[:2]), text("\N{SNOWMAN}".encode()[2:]), text(b"two"))
SOUND: Final = (sound(100), sound(9000), sound(600_000), sound(50))
KINDS: dict[str, Kind] = {
    "lines": Kind(
        what={"url": "/generate", "json": {**FULL, "output_modalities": ["text", "audio"]}},
        outputs=(*TEXT, *SOUND[:2]),
    ),
    "bare lines": Kind(what={"url": "/generate", "data": {"text": "x", "output_modalities": "audio"}}, outputs=SOUND),
    "frames": Kind(
        what={
            "url": "/generate",
            "json": {**FULL, "output_modalities": ["audio", "text"]},
            "headers": {"Accept": "application/x-mstar-frames"},
        },
        outputs=(TEXT[0], *SOUND),
    ),
    "chat": Kind(what={"url": "/v1/chat/completions", "json": {"messages": SAY, "stream": True}}, outputs=TEXT),
    "two chats": Kind(
        what={"url": "/v1/chat/completions", "json": {"messages": SAY, "stream": True, "n": 2, "modalities": ["text"]}},
        outputs=TEXT,
        items=2,
    ),
    "kept chat": Kind(
        what={
            "url": "/v1/chat/completions",
            "json": {"messages": SAY, "stream": True},
            "headers": {"X-Mstar-Detach": "true"},
        },
        outputs=TEXT,
    ),
    "response": Kind(what={"url": "/v1/responses", "json": {"input": "hi", "stream": True}}, outputs=TEXT),
    "transcript": Kind(
        what={
            "url": "/v1/audio/transcriptions",
            "data": {"stream": "true"},
            "files": {"file": ("a.wav", media.wav(0.01))},
        },
        outputs=TEXT,
    ),
    "images": Kind(
        what={"url": "/v1/images/generations", "json": {"prompt": "x", "stream": True}},
        outputs=(TEXT[0], ("image", NOISE)),
    ),
    "sound events": Kind(
        what={"url": "/v1/audio/speech", "json": {"input": "x", "stream_format": "sse"}}, outputs=SOUND
    ),
    "sound": Kind(
        what={"url": "/v1/audio/speech", "json": {"input": "x", "stream": True, "response_format": "wav"}},
        outputs=SOUND,
        is_sound=True,
    ),
    "opus": Kind(
        what={"url": "/v1/audio/speech", "json": {"input": "x", "stream": True, "response_format": "opus"}},
        outputs=(*SOUND[:2], sound(30_000), SOUND[3]),
        is_sound=True,
    ),
}
KINDS |= {f"{name} by HTTP/1.0": replace(KINDS[name], version="1.0") for name in ("lines", "chat", "sound")}


# what a client reads


class Torn(AssertionError):
    """The bytes are not a valid response."""


@dataclass(slots=True)
class Read:
    """A response as a strict client reads it. is_whole: its last chunk has come."""

    head: bytes
    body: bytes
    is_whole: bool


def read(data: bytes, wire: Wire, kind: Kind) -> Read:
    """Parse a response: in chunks, or of HTTP/1.0 up to the end of the connection. Raises Torn for an invalid chunk."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found or not head.startswith(b"HTTP/1.1 200 "):
        raise Torn(head[:80])
    if kind.version == "1.0":
        return Read(head, rest, is_whole=wire.is_over and not wire.is_reset)
    body = b""
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        if not line or not set(line) <= set(b"0123456789abcdef"):
            raise Torn(f"illegal chunk header {line[:80]!r} behind {body[-80:]!r}")
        size = int(line, 16)
        if not size:
            if rest != b"\r\n":
                raise Torn(f"bytes behind the end: {rest[:80]!r}")
            return Read(head, body, is_whole=True)
        body += rest[:size]
        if len(rest) >= size + 2 and rest[size : size + 2] != b"\r\n":
            raise Torn(f"a chunk of {size} bytes is followed by {rest[size : size + 80]!r}")
        rest = rest[size + 2 :]
    return Read(head, body, is_whole=False)


def events(answer: Read) -> list[dict[str, Any]]:
    """Return the events of a body, each as an object. Raises Torn."""
    try:
        if b"text/event-stream" in answer.head:
            return list(_sent_events(answer.body))
        if b"mstar-frames" in answer.head:
            return list(_frames(answer.body))
        return [{**(line := json.loads(text)), "data": base64.b64decode(line["data"])} for text in _lines(answer.body)]
    except (ValueError, KeyError, struct.error) as error:
        raise Torn(f"{error}: {answer.body[-200:]!r}") from error


def _lines(body: bytes) -> list[bytes]:
    *lines, rest = body.split(b"\n")
    if rest:
        raise Torn(f"a torn line: {rest[-200:]!r}")
    return [line for line in lines if line]


def _sent_events(body: bytes) -> Iterator[dict[str, Any]]:
    *blocks, rest = body.split(b"\n\n")
    if rest:
        raise Torn(f"a torn event: {rest[-200:]!r}")
    number = 0
    for block in blocks:
        fields = dict(line.split(b": ", 1) for line in block.splitlines())
        if b"data" not in fields:
            continue
        number += 1
        if int(fields.get(b"id", number)) != number:
            raise Torn(f"event {number} has the number {fields[b'id']!r}")
        found = {"done": True} if fields[b"data"] == b"[DONE]" else json.loads(fields[b"data"])
        if found.get("sequence_number", number - 1) != number - 1:
            raise Torn(f"event {number} has the number {found['sequence_number']}")
        yield found


def _frames(body: bytes) -> Iterator[dict[str, Any]]:
    while body:
        header, payload = struct.unpack_from("<IQ", body)
        if len(body) < 12 + header + payload:
            raise Torn("a torn frame")
        yield {**json.loads(body[12 : 12 + header]), "data": body[12 + header : 12 + header + payload]}
        body = body[12 + header + payload :]


def ends(event: dict[str, Any]) -> bool:
    """Return whether no event may follow."""
    kinds = (event.get("modality"), event.get("type"))
    last = ("done", "speech.audio.done", "transcript.text.done", "response.completed", "response.failed")
    return is_error(event) or bool(event.get("done")) or any(kind in last for kind in kinds)


def is_error(event: dict[str, Any]) -> bool:
    """Return whether an event says that the request has failed."""
    kinds = (event.get("modality"), event.get("type"))
    return "error" in event or "error" in kinds or "response.failed" in kinds


def outputs(found: list[dict[str, Any]]) -> dict[str, bytes]:
    """Return the outputs in some events, joined by kind."""
    joined: dict[str, bytes] = {}
    for event in found:
        for name, data in _outputs(event):
            joined[name] = joined.get(name, b"") + data
    return joined


def _outputs(event: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    if "modality" in event and not ends(event):
        yield event["modality"], event["data"]
    for choice in event.get("choices", ()):
        yield f"text {choice['index']}", (choice["delta"].get("content") or "").encode()
    for name in ("delta", "audio", "b64_json"):
        if isinstance(event.get(name), str):
            yield name, event[name].encode()


# what the second process does


@dataclass(slots=True)
class Scene:
    """One continued response. kind, api: of the test. seen: number of requests before it."""

    api: Api
    kind: Kind
    went: Continued
    seen: int

    async def sent(self) -> list[NewRequest]:
        """Return the requests that the conductor gets."""
        await self.api.fake.next_request(self.seen + self.kind.items)
        return self.api.fake.requests[self.seen :]

    async def over(self) -> None:
        """Wait until the response has ended, in one way or the other."""
        closes = self.kind.version == "1.0"
        await self.api.until(lambda: self.went.wire.is_over or (self.went.connection.is_idle and not closes))

    def cancel(self) -> None:
        """Cancel the request by its id."""
        for live in self.api.process.registry:
            live.cancel()


def give(fake: FakeDeployment, request: NewRequest, kind: Kind) -> None:
    """Send all outputs of a request that it asks for."""
    for modality, array in kind.outputs:
        if modality in request.outputs:
            fake.output(request.handle, modality, array, port=modality)


async def goes_on(scene: Scene) -> None:
    for request in await scene.sent():
        give(scene.api.fake, request, scene.kind)
        scene.api.fake.finish(request.handle)


async def is_cancelled_in_the_queue(scene: Scene) -> None:
    await scene.api.until(lambda: len(scene.api.process.registry) == scene.kind.items)
    scene.cancel()


async def is_cancelled_before_an_output(scene: Scene) -> None:
    await scene.sent()
    scene.cancel()


async def is_cancelled_behind_the_outputs(scene: Scene) -> None:
    for request in await scene.sent():
        give(scene.api.fake, request, scene.kind)
    registry = scene.api.process.registry
    await scene.api.until(lambda: not scene.went.is_behind or any("first" in live.result for live in registry))
    scene.cancel()


async def fails(scene: Scene) -> None:
    for request in await scene.sent():
        scene.api.fake.fail(request.handle)


async def repeats_only_a_part(scene: Scene) -> None:
    for request in await scene.sent():
        modality, array = next(each for each in scene.kind.outputs if each[0] in request.outputs)
        scene.api.fake.output(request.handle, modality, array[:1], port=modality)
        scene.api.fake.fail(request.handle)


async def is_late(scene: Scene) -> None:
    """The deadline has passed before the request runs again."""


async def is_refused(scene: Scene) -> None:
    """The deployment has become unhealthy."""


Turn = Callable[[Scene], Awaitable[None]]
TURNS: Final[tuple[Turn, ...]] = (
    goes_on,
    is_cancelled_in_the_queue,
    is_cancelled_before_an_output,
    is_cancelled_behind_the_outputs,
    fails,
    repeats_only_a_part,
    is_late,
    is_refused,
)


async def undisturbed(api: Api, kind: Kind, wire: Any) -> None:
    """Let the first process send the response, one output in a write where they are visible."""
    await api.fake.next_request(kind.items)
    for request in api.fake.requests:
        for modality, array in kind.outputs:
            if modality in request.outputs:
                before, encoded = len(wire.written), encoded_of(api, request)
                api.fake.output(request.handle, modality, array, port=modality)
                await api.until(lambda: encoded_of(api, request) > encoded)  # noqa: B023 called at once
                for _ in range(PATIENCE):
                    await asyncio.sleep(0.001)
                    if len(wire.written) > before:
                        break
        api.fake.finish(request.handle)
    await api.until(lambda: wire.is_over if kind.version == "1.0" else wire.written.endswith(b"0\r\n\r\n"))


def encoded_of(api: Api, request: NewRequest) -> int:
    """Return how much of the outputs of a request the api has encoded."""
    live = api.process.registry.get(request.handle)
    encoder = live.encoder if live is not None else None
    return encoder.text_tokens + encoder.samples + encoder.images if encoder is not None else 0


def request_of(api: Api, kind: Kind) -> bytes:
    """Return the request of a kind as bytes on the wire."""
    request = api.client.build_request("POST", **kind.what)
    lines = [f"{request.method} {request.url.raw_path.decode()} HTTP/{kind.version}".encode()]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n" + request.read()


async def continued(api: Api, kind: Kind, moment: Moment, has: bytes, turn: Turn) -> Continued:
    """Return the response that goes on from a moment."""
    admission: Any = api.process._service.admission  # type: ignore[union-attr]
    admission.pause(is_paused=turn is is_cancelled_in_the_queue)
    api.process.link.deployment.state = "unhealthy" if turn is is_refused else "ready"
    with second_process(api, moment, has, is_late=turn is is_late) as went:
        scene = Scene(api, kind, went, len(api.fake.requests))
        if went.connection.continues:  # otherwise its end was recorded
            async with asyncio.timeout(LIMIT_S):
                await turn(scene)
                await scene.over()
        admission.pause(is_paused=False)
    api.process.link.deployment.state = "ready"
    await api.clean()
    return went


def check(went: Continued, kind: Kind, calm: Read, turn: Turn) -> None:
    """Check one response against the undisturbed one."""
    answer = read(went.received, went.wire, kind)
    assert answer.head == calm.head
    if kind.is_sound:
        assert answer.is_whole or went.wire.is_over, "the client waits for ever"
        assert calm.body.startswith(answer.body)
        assert answer.body == calm.body or not answer.is_whole
        if turn is goes_on:
            assert answer.is_whole
        return
    assert answer.is_whole, "a stream of events has an end"
    found = events(answer)
    assert not any(map(ends, found[:-1])), "events behind the last one"
    assert "type" in found[-1] or found[0].get("type") != "response.created", "an event of another kind"
    reference, got = outputs(events(calm)), outputs(found)
    if turn is goes_on:
        assert not is_error(found[-1]) and got == reference
    else:
        assert all(reference[name].startswith(data) for name, data in got.items())
    if turn is is_refused and is_error(found[-1]):
        assert b"unavailable" in answer.body, "the error has its cause"


def ways(moments: list[Moment]) -> Iterator[tuple[Moment, bytes, Sequence[Turn]]]:
    """Yield each moment with what the client has then, and what the second process does.

    `MSTAR_CUTS=1` tries all combinations; by default each moment has one amount of bytes and half of the turns.
    """
    for number, moment in enumerate(moments):
        amounts = [has for has in moment.client_has if has]
        if IS_COMPLETE:
            yield from ((moment, has, TURNS) for has in amounts)
        elif amounts:
            yield moment, amounts[number % len(amounts)], (goes_on, *TURNS[1 + number % 2 :: 2])


@pytest.mark.parametrize("name", KINDS)
async def test_a_response_goes_on_from_any_write_or_ends_as_a_valid_one(name: str) -> None:
    kind = KINDS[name]
    async with running(model=SPEC) as api:
        with first_process(api, request_of(api, kind)) as wire:
            await undisturbed(api, kind, wire)
            calm, moments = read(wire.written, wire, kind), list(wire.moments)
            for number, (moment, has, turns) in enumerate(ways(moments)):
                for turn in turns:
                    went = await continued(api, kind, moment, has, turn)
                    try:
                        check(went, kind, calm, turn)
                    except AssertionError as error:
                        where = f"{turn.__name__}, write {number}, {len(has)} bytes"
                        raise AssertionError(f"{where}: {error}") from error


async def test_the_interim_response_is_sent_once_and_is_no_part_of_the_response() -> None:
    kind = KINDS["lines"]
    async with running(model=SPEC) as api:
        head, _, body = request_of(api, kind).partition(b"\r\n\r\n")
        with first_process(api, head + b"\r\nExpect: 100-continue\r\n\r\n") as wire:
            await api.until(lambda: bool(wire.written))
            wire.connection.data_received(body)
            await undisturbed(api, kind, wire)
            interim = b"HTTP/1.1 100 Continue\r\n\r\n"
            calm = read(wire.written.removeprefix(interim), wire, kind)
            asked, *others = wire.moments
            assert asked.following == interim
            # The first process died before it had the body, or behind the first part of the response.
            for moment, rest in ((asked, body), (others[1], b"")):
                with second_process(api, moment, moment.written + moment.following) as went:
                    went.connection.data_received(rest) if rest else None
                    async with asyncio.timeout(LIMIT_S):
                        scene = Scene(api, kind, went, len(api.fake.requests))
                        await goes_on(scene)
                        await scene.over()
                answer = read(went.received.removeprefix(interim), went.wire, kind)
                assert answer.is_whole and outputs(events(answer)) == outputs(events(calm))
