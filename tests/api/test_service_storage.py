"""Full disk: requests that need it are refused, others are served, and service resumes once there is space.

A file size limit simulates a full disk: it needs no privilege, and the kernel refuses the write.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from mstar_core.messages.flow import Output, Outputs
from mstar_core.messages.tensors import InlineTensor
from mstar_core.transport.shm import TensorTransport
from tests.api.conftest import LIMIT_S, Started
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC

ROOM = 512 * 1024
LARGE = media.image(900, 800, "BMP")
SPOKEN = {"text": "x", "output_modalities": "audio"}


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit the size of all files of this process to `ROOM`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_files(folder: Path) -> list[str]:
    """Return the files of the folder that this process holds open, including unnamed ones."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [target for target in targets if target.startswith(str(folder))]


def told(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


@pytest.mark.parametrize(("count", "fails"), [(400, False), (1200, True)], ids=["16 MB", "48 MB"])
async def test_a_slow_client_on_a_full_disk_is_served_from_memory_and_fails_alone_beyond_it(
    count: int, fails: bool, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with started() as api:
        wanted = np.full(20_000, 7, dtype="<i2").tobytes()
        with full_disk(), socket.create_connection(("127.0.0.1", api.process.port)) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
            body = b"text=x&output_modalities=audio&request_id=slow"
            head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n"
            slow.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            request = await api.fake.next_request()
            other = asyncio.create_task(api.client.post("/generate", data={**SPOKEN, "streaming": "false"}))
            neighbour = await api.fake.next_request(2)
            for number in range(count):
                api.fake.audio(request.handle, 20_000)
                if number % (count // 10) == 0:
                    api.fake.audio(neighbour.handle, 20_000)
                    await asyncio.sleep(0)
                if number == count * 6 // 10:
                    await api.until(lambda: "stay in memory" in caplog.text)  # the disk has been tried
            api.fake.finish(neighbour.handle)
            api.fake.finish(request.handle)
            (sound,) = (await other).json()["outputs"]["audio"]
            assert len(sound["data"]) == 4 * ((10 * len(wanted) + 2) // 3)
            text = (await asyncio.to_thread(read_all, slow)).decode()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"modality"')]
        if fails:
            assert (lines[-1]["modality"], lines[-1]["metadata"]["code"]) == ("error", "storage_full")
        else:
            sounds = [base64.b64decode(line["data"]) for line in lines if line["modality"] == "audio"]
            assert b"".join(sounds) == count * wanted and text.endswith("\r\n0\r\n\r\n")
        await api.until(lambda: api.service_is_clean)
        await api.fake.until(lambda: api.fake.live_loans == 0)


def read_all(connection: socket.socket) -> bytes:
    """Return everything up to the end of the chunked body."""
    connection.settimeout(LIMIT_S)
    data = bytearray()
    while not data.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return bytes(data)


async def test_a_request_waits_for_room_in_shared_memory_and_ends_no_other(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mstar_core.transport.shm.TensorTransport", partial(TensorTransport, max_bytes=4096, inline_bytes=-1)
    )
    form = {"text": "x" * 400, "streaming": "false"}  # its ids fit once
    async with started(model=SPEC) as api:
        runs = asyncio.create_task(api.client.post("/generate", data=form))
        first = await api.fake.next_request()
        waits = asyncio.create_task(api.client.post("/generate", data=form))
        late = await api.client.post("/generate", data={**form, "timeout_s": "0.3"})
        assert told(late) == (504, "timeout") and len(api.fake.requests) == 1
        gone = asyncio.create_task(api.client.post("/generate", data={**form, "request_id": "gone"}))
        await api.until(lambda: len(api.process.registry) == 3)
        assert told(await api.client.post("/v1/requests/gone/cancel")) == (200, "")
        assert told(await gone)[0] == 499
        api.fake.finish(first.handle)
        assert told(await runs) == (200, "")
        second = await api.fake.next_request(2)
        api.fake.finish(second.handle)
        assert told(await waits) == (200, "")
        await api.until(lambda: api.service_is_clean)


async def test_an_output_that_cannot_be_read_fails_its_request_and_no_other_of_its_message(started: Started) -> None:
    async with started() as api:
        bad = asyncio.create_task(api.client.post("/generate", data={**SPOKEN, "streaming": "false"}))
        broken = await api.fake.next_request()
        good = asyncio.create_task(api.client.post("/generate", data={**SPOKEN, "streaming": "false"}))
        fine = await api.fake.next_request(2)
        lies = InlineTensor(dtype="int16", shape=(999,), data=b"\0\0")
        items = [
            Output(handle=broken.handle, seq=0, port="pcm", modality="audio", ref=lies),
            Output(
                handle=fine.handle,
                seq=0,
                port="pcm",
                modality="audio",
                ref=InlineTensor(dtype="int16", shape=(2,), data=b"abcd"),
            ),
        ]
        api.fake.tell(Outputs(worker="worker-0", items=items), sender="worker-0")
        api.fake.finish(fine.handle, emitted=1)
        assert told(await bad) == (500, "engine_error")
        assert (await good).json()["outputs"]["audio"][0]["data"] == "YWJjZA=="
        await api.until(lambda: api.service_is_clean)


async def test_large_uploads_are_gone_however_their_request_ends(
    started: Started, record_property: Callable[[str, object], None]
) -> None:
    form, file = {"text": "x", "streaming": "false"}, {"files": ("../../a", LARGE)}
    async with started(echo, model=SPEC, max_concurrent_requests=1) as api:
        assert told(await api.client.post("/generate", data=form, files=file)) == (200, "")
        api.fake.script = None
        runs = asyncio.create_task(api.client.post("/generate", data={**form, "request_id": "runs"}, files=file))
        await api.fake.next_request(2)
        ends = [{"timeout_s": "0.2"}, {"temperature": "hot"}, {"request_id": "cancelled"}, {"request_id": "left"}]
        waiting = [asyncio.create_task(api.client.post("/generate", data={**form, **e}, files=file)) for e in ends]
        last = {"runs", "cancelled", "left"}  # the first two end by themselves
        await api.until(lambda: {live.request_id for live in api.process.registry} == last)
        waiting[3].cancel()
        assert (await api.client.post("/v1/requests/cancelled/cancel")).status_code == 200
        assert [told(await task)[0] for task in waiting[:3]] == [504, 400, 499]
        api.fake.fail(api.fake.requests[1].handle)
        assert told(await runs) == (500, "engine_error")
        await api.until(lambda: api.service_is_clean)
        assert open_files(api.process.spec.uploads) == [], "nothing is held"
        assert not list(api.process.spec.uploads.iterdir()), "no file has a name that could stay"
    record_property("large_uploads", len(ends) + 2)
