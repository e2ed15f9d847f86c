"""Numeric outputs: in every format, of any size, as frames without base64."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import struct
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from mstar_core.api.errors import Stalled
from mstar_core.api.output.encode import MOST_JSON, NumberForm, packed, widened
from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.output.spool import Spool
from mstar_core.api.output.units import OutputItem
from mstar_core.client.arrays import array_of
from mstar_core.errors import RequestError
from mstar_core.messages.flow import Output, Outputs
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import param
from tests.api.conftest import Started
from tests.fakes.any_model import SPEC
from tests.fakes.conductor import FakeDeployment

FRAMES = "application/x-mstar-frames"
VALUES = np.array([[1.5, -2.25, 3.0], [1e-3, 65504.0, 0.1]], dtype="<f4")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    output_format: str = param("raw", "form of tensors", choices=("raw", "npy", "safetensors", "json"))
    output_dtype: str | None = param(None, "number type", choices=("float32", "float16", "bfloat16"))
    max_output_tokens: int = param(100, "ids", ge=1, le=4096)


MODEL = dataclasses.replace(SPEC, params=Params)


def item(array: np.ndarray, dtype: str | None = None) -> OutputItem:
    return OutputItem(modality="tensor", port="latents", array=array, meta={"step": 3}, dtype=dtype)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of values that bfloat16 represents exactly."""
    return (np.ascontiguousarray(values, dtype="<f4").view("<u4") >> 16).astype("<u2")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
def test_what_is_packed_is_read_again_by_the_client(form: Any, dtype: str) -> None:
    if (form, dtype) == ("npy", "bfloat16"):
        with pytest.raises(RequestError, match="npy does not support bfloat16"):
            packed(item(VALUES), NumberForm(form=form, dtype=dtype))
        return
    data, facts = packed(item(VALUES), NumberForm(form=form, dtype=dtype))
    assert facts == {"step": 3, "shape": [2, 3], "dtype": dtype, "name": "latents", "format": form}
    if form == "json" and dtype == "bfloat16":
        found = np.array(json.loads(data), np.float32)
    else:
        found = array_of(data, facts)
    tolerance = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    np.testing.assert_allclose(np.asarray(found, np.float32), VALUES, rtol=tolerance)


def test_the_forms_are_those_of_their_libraries() -> None:
    data, _ = packed(item(VALUES), NumberForm(form="safetensors"))
    assert np.array_equal(load(data)["latents"], VALUES)
    data, _ = packed(item(VALUES), NumberForm(form="npy"))
    assert np.array_equal(np.load(io.BytesIO(data), allow_pickle=False), VALUES)


def test_whole_numbers_keep_their_type() -> None:
    data, facts = packed(item(np.arange(3)), NumberForm(form="raw", dtype="float16"))
    assert facts["dtype"] == "int64" and np.frombuffer(data, "<i8").tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_bfloat16_of_a_node_is_told_or_converted(dtype: str | None) -> None:
    exact = np.array([1.5, -2.0, 0.0078125], dtype="<f4")
    data, facts = packed(item(bfloat16(exact), "bfloat16"), NumberForm(dtype=dtype))
    assert facts["dtype"] == (dtype or "bfloat16")
    assert np.array_equal(np.asarray(array_of(data, facts), np.float32), exact)
    assert np.array_equal(widened(item(bfloat16(exact), "bfloat16")), exact)


def test_bfloat16_is_rounded_to_the_nearest_and_keeps_what_is_no_number() -> None:
    given = np.array([1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38], dtype="<f4")  # two ties, to even
    data, facts = packed(item(given), NumberForm(dtype="bfloat16"))
    found = array_of(data, facts)
    assert found[:2].tolist() == [1.0, 1.015625] and found[2] == np.inf and found[3] == -np.inf
    assert np.isnan(found[4]) and found[5] == np.inf


def test_text_of_many_numbers_is_refused_with_their_count() -> None:
    with pytest.raises(RequestError, match=str(MOST_JSON + 1)):
        packed(item(np.zeros(MOST_JSON + 1)), NumberForm(form="json"))


def send(array: np.ndarray, count: int = 1, modality: str = "tensor", dtype: str | None = None) -> Any:
    """Return the script of a worker that sends an array some times."""

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        for seq in range(count):
            ref = fake._tensors.put(array, "api", dtype=dtype)
            output = Output(
                handle=request.handle, seq=seq, port="latents", modality=modality, ref=ref, meta={"step": seq}
            )
            fake.tell(Outputs(worker="worker-0", items=[output]), sender="worker-0")
        fake.finish(request.handle, emitted=count)

    return script


def frames(body: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Return headers and payloads."""
    found = []
    while body:
        head, size = struct.unpack_from("<IQ", body)
        found.append((json.loads(body[12 : 12 + head]), body[12 + head : 12 + head + size]))
        body = body[12 + head + size :]
    return found


@pytest.mark.parametrize("streaming, steps", [("true", 3), ("false", 1)])
async def test_large_outputs_come_as_frames_in_parts(streaming: str, steps: int, started: Started) -> None:
    """Three steps of 24 MB exceed a queue, a line and the first size of a spill file."""
    array = np.random.default_rng(0).integers(0, 255, (3, 2**23), dtype=np.uint8)
    async with started(send(array, steps), model=MODEL) as api:
        answer = await api.client.post(
            "/generate",
            data={"text": "x", "output_modalities": "tensor", "streaming": streaming},
            headers={"Accept": FRAMES},
        )
        await api.fake.until(lambda: api.fake.live_loans == 0)
    assert answer.headers["content-type"] == FRAMES
    (first, _), *parts, (last, nothing) = frames(answer.content)
    assert (first["modality"], last["modality"], nothing) == ("start", "done", b"")
    assert [(h["metadata"]["step"], h["metadata"]["part"]) for h, _ in parts] == [
        (s, p) for s in range(steps) for p in (0, 1)
    ]
    for step in range(steps):
        whole = b"".join(data for header, data in parts if header["metadata"]["step"] == step)
        assert whole == array.tobytes()
    facts = parts[0][0]["metadata"]
    assert (facts["shape"], facts["dtype"], facts["name"], facts["parts"]) == ([3, 2**23], "uint8", "latents", 2)


@pytest.mark.parametrize("modality", ["tensor", "action", "scalar"])
async def test_every_modality_of_numbers_takes_the_form_asked_for(modality: str, started: Started) -> None:
    async with started(send(VALUES, modality=modality), model=MODEL) as api:
        fields = {"text": "x", "output_modalities": modality, "output_format": "npy", "output_dtype": "float16"}
        answer = await api.client.post("/generate", data=fields)
    (line,) = [json.loads(each) for each in answer.text.splitlines()]
    assert line["metadata"]["format"] == "npy" and line["metadata"]["dtype"] == "float16"
    found = np.load(io.BytesIO(base64.b64decode(line["data"])))
    assert np.array_equal(found, VALUES.astype(np.float16))


async def test_latents_sent_as_video_are_made_by_the_model(started: Started) -> None:
    exact = np.array([[1.5, -2.0]], dtype="<f4")
    async with started(send(bfloat16(exact), modality="video", dtype="bfloat16"), model=MODEL) as api:
        fields = {"text": "x", "output_modalities": "video", "output_format": "npy"}
        answer = await api.client.post("/generate", data=fields, headers={"Accept": FRAMES})
    _, (header, data), _ = frames(answer.content)
    assert header["metadata"]["dtype"] == "float32" and np.frombuffer(data, "<f4").tolist() == [1.5, -2.0]


async def test_what_a_form_cannot_hold_is_an_error_of_the_request(started: Started) -> None:
    async with started(send(VALUES), model=MODEL) as api:
        fields = {"text": "x", "output_modalities": "tensor", "output_format": "npy", "output_dtype": "bfloat16"}
        answer = await api.client.post("/generate", data=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "output_format"
        await api.until(lambda: api.service_is_clean)


async def test_a_few_large_outputs_wait_for_a_client_that_reads(tmp_path: Any) -> None:
    output_queue = OutputQueue(Spool(tmp_path, limit=1000), queue_bytes=100)
    for seq in range(8):
        output_queue.put("worker-0", seq, item(np.full(500, seq, dtype=np.uint16), "bfloat16"))
    taken: list[OutputItem] = []
    while output_queue.waits:
        taken += await output_queue.take(1.0, limit_bytes=1)
        await asyncio.sleep(0)
    assert [int(each.array[0]) for each in taken] == list(range(8)) and taken[-1].dtype == "bfloat16"
    for seq in range(8, 20):
        output_queue.put("worker-0", seq, item(np.full(500, seq, dtype=np.uint16)))
    with pytest.raises(Stalled):
        while True:
            await output_queue.take(1.0)
    output_queue.close()


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["raw", "safetensors", "json"])
async def test_a_number_of_no_dimension_stays_one(form: Any, dtype: str | None, tmp_path: Any) -> None:
    spool = Spool[OutputItem](tmp_path)
    number = item(np.float32(2.5).reshape(()))
    spool.add(number, number.array)
    while spool.in_memory:  # noqa: ASYNC110 a thread writes
        await asyncio.sleep(0.001)
    spooled = dataclasses.replace(number, array=(await spool.pop())[1])
    spool.close()
    for each in (spooled, item(np.float32(2.5).reshape(()))):
        data, facts = packed(each, NumberForm(form=form, dtype=dtype))
        found = array_of(data, facts)
        assert (facts["shape"], found.shape, float(found)) == ([], (), 2.5)
