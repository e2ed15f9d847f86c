"""The tiny checkpoint as a real deployment: processes, sockets, uploads, raw actions back."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.runtime.deployment import Deployment, plan

HORIZON, DIM = 10, 8
STATE = "[0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]"


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    where = plan({0: ("vit_encoder", "LLM")})
    options = {"model": "pi05", "plugin": "pi05", "max_seq_len": 1024, "model_kwargs": {"action_dim": DIM}}
    with Deployment(name="pi05", where=where, **options) as running:
        yield running


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (value, 40, 90)).save(file, "PNG")
    return file.getvalue()


def post(server: Deployment, cameras: int = 2, *, accept: str = "", **fields: Any) -> httpx.Response:
    files = [("files", (f"{number}.png", png(50 * number), "image/png")) for number in range(cameras)]
    given = {"text": "pick up the block", "robot_state": STATE, "seed": "5", "streaming": "false", **fields}
    return httpx.post(
        f"{server.url}/generate", data={name: value for name, value in given.items() if value is not None},
        files=files, headers={"accept": accept} if accept else {}, timeout=60,
    )  # fmt: skip


def actions(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    (entry,) = answer.json()["outputs"]["action"]
    assert entry["metadata"]["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["metadata"]["shape"])


def test_actions_come_back_as_raw_floats_of_the_horizon(server: Deployment) -> None:
    answer = post(server)
    made = actions(answer)
    assert made.shape == (HORIZON, DIM) and np.isfinite(made).all()
    assert answer.json()["warnings"] == []
    normal = actions(post(server, return_normalized="true"))
    wide = np.array([1 + 0.125 * index for index in range(DIM)])
    np.testing.assert_allclose(made, (normal + 1) / 2 * (2 * wide + 1e-6) - 0.125 - wide, atol=1e-5)


def test_the_binary_form_holds_the_same_bytes(server: Deployment) -> None:
    body = post(server, accept="application/x-mstar-frames", streaming="true").content
    at, found = 0, {}
    while at < len(body):
        head, size = struct.unpack_from("<IQ", body, at)
        header = msgspec.json.decode(body[at + 12 : at + 12 + head])
        found[header["modality"]] = body[at + 12 + head : at + 12 + head + size]
        at += 12 + head + size
    assert found["action"] == actions(post(server)).tobytes()


def test_many_robots_at_once_get_what_each_gets_alone(server: Deployment) -> None:
    asked = [{"cameras": 1 + n % 3, "num_steps": str(4 + n % 3), "seed": str(n)} for n in range(8)]
    alone = [actions(post(server, **each)) for each in asked]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: actions(post(server, **each)), asked))
    for first, second in zip(alone, together, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"robot_state": None}, 400, "robot_state"), ({"robot_state": "[1, NaN]"}, 400, "robot_state"),
        ({"cameras": 4}, 400, "files"), ({"image_mask": "[true, true, true]"}, 400, "image_mask"),
        ({"num_steps": "21"}, 400, "num_steps"), ({"noise": "[[0.0]]"}, 400, "noise"), ({"text": ""}, 400, "text"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_answered_by_its_field(
    fields: dict[str, Any], status: int, field: str, server: Deployment
) -> None:
    answer = post(server, **fields)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == field, answer.text


def test_nothing_is_held_when_all_have_gone(server: Deployment) -> None:
    post(server)
    server.assert_clean()
