"""The tiny checkpoint as a real deployment: processes, sockets, uploads, raw actions back; commands and the example."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.deployment import REPO, Deployment, Served

HORIZON, DIM = 10, 8
LIMIT_S = 120.0
STATE = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]
PI05 = Served(
    model="pi05",
    plugin="pi05",
    nodes=("vit_encoder", "LLM"),
    settings={
        "max_seq_len": 1024,
        "kv_cache": KVCacheConfig(pages=256),
        "model_kwargs": {"action_dim": DIM},
    },
)


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    with Deployment(served=PI05) as running:
        yield running
        running.assert_clean()


def picture(mode: str = "RGB", size: tuple[int, int] = (64, 48), form: str = "PNG", value: int = 90) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, value).convert(mode).save(file, form)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def post(
    server: Deployment, *files: bytes, accept: str = "", cameras: int | None = None, **fields: Any
) -> httpx.Response:
    sent = files or [picture(value=50 * number) for number in range(2 if cameras is None else cameras)]
    given = {"text": "pick up the block", "robot_state": json.dumps(STATE), "seed": "5", "streaming": "false", **fields}
    return httpx.post(
        f"{server.url}/generate",
        data={name: value for name, value in given.items() if value is not None},
        files=[("files", (f"{number}", data)) for number, data in enumerate(sent)] or None,
        headers={"accept": accept} if accept else {},
        timeout=LIMIT_S,
    )


def actions(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    (entry,) = answer.json()["outputs"]["action"]
    assert entry["metadata"]["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["metadata"]["shape"])


def test_actions_come_back_as_raw_floats_of_the_horizon(server: Deployment) -> None:
    answer = post(server)
    actual = actions(answer)
    assert actual.shape == (HORIZON, DIM) and np.isfinite(actual).all()
    assert answer.json()["warnings"] == []
    normal = actions(post(server, return_normalized="true"))
    wide = np.array([1 + 0.125 * index for index in range(DIM)])
    np.testing.assert_allclose(actual, (normal + 1) / 2 * (2 * wide + 1e-6) - 0.125 - wide, atol=1e-5)


@pytest.mark.parametrize("asked", [None, "true", "false"])
def test_every_answer_says_in_which_units_it_is(asked: str | None, server: Deployment) -> None:
    (entry,) = post(server, return_normalized=asked).json()["outputs"]["action"]
    assert entry["metadata"]["normalized"] is (asked == "true")


def test_usage_counts_what_the_cameras_take(server: Deployment) -> None:
    one, two = (post(server, cameras=count).json()["usage"]["prompt_tokens_details"] for count in (1, 2))
    assert two["image_tokens"] == 2 * one["image_tokens"] > 0
    assert two["text_tokens"] == one["text_tokens"] > 0
    off = post(server, image_mask="[true, false]").json()["usage"]["prompt_tokens_details"]
    assert off == one


def test_the_binary_form_holds_the_same_bytes(server: Deployment) -> None:
    body = post(server, accept="application/x-mstar-frames", streaming="true").content
    at, actual = 0, {}
    while at < len(body):
        head, size = struct.unpack_from("<IQ", body, at)
        header = msgspec.json.decode(body[at + 12 : at + 12 + head])
        actual[header["modality"]] = body[at + 12 + head : at + 12 + head + size]
        at += 12 + head + size
    assert actual["action"] == actions(post(server)).tobytes()


def test_many_robots_at_once_get_what_each_gets_alone(server: Deployment) -> None:
    """Camera counts, prompt lengths and flow steps all differ within the batch."""
    asked: list[dict[str, Any]] = [
        {"cameras": 1 + n % 3, "num_steps": str(4 + n % 3), "seed": str(n), "text": "pick " + "up " * n}
        for n in range(8)
    ]
    alone = [actions(post(server, **each)) for each in asked]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: actions(post(server, **each)), asked))
    for first, second in zip(alone, together, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "size", "form"),
    [
        ("RGB", (48, 640), "PNG"),
        ("L", (64, 48), "PNG"),
        ("RGBA", (64, 48), "WEBP"),
        ("P", (64, 48), "GIF"),
        ("CMYK", (64, 48), "JPEG"),
        ("1", (1, 1), "BMP"),
        ("I;16", (30, 40), "TIFF"),
    ],
    ids=["portrait", "grey", "alpha", "palette", "cmyk", "one pixel", "16 bit"],
)
def test_odd_pictures_are_cameras_too(mode: str, size: tuple[int, int], form: str, server: Deployment) -> None:
    file = io.BytesIO()
    Image.new(mode, size).save(file, form)
    assert actions(post(server, file.getvalue())).shape == (HORIZON, DIM)


HUGE = picture("1", (8000, 7000))
NO_NUMBERS = npy(np.full(8, np.nan))
BAD: dict[str, tuple[tuple[bytes, ...], dict[str, Any], int, str, str]] = {
    "no camera": ((), {"cameras": 0}, 400, "files", "1 to 3"),
    "four cameras": ((), {"cameras": 4}, 400, "files", "at most 3"),
    "corrupt camera": ((picture()[:60],), {}, 422, "files", "camera image 0"),
    "camera of no kind": ((b"no image at all",), {}, 415, "files", "type"),
    "huge camera": ((HUGE,), {}, 413, "files", "50000000"),
    "a sound": ((b"RIFF\0\0\0\0WAVE",), {}, 415, "files", "image"),
    "array of no use": ((picture(), npy(np.zeros((2, 3)))), {}, 400, "files", "[h, w, 3]"),
    "camera of levels as floats": ((npy(np.full((4, 4, 3), 255.0)),), {}, 400, "files", "0 to 1"),
    "camera with NaN": ((npy(np.full((4, 4, 3), np.nan)),), {}, 400, "files", "finite"),
    "no state": ((), {"robot_state": None}, 400, "robot_state", "joint values"),
    "short state": ((), {"robot_state": "[]"}, 400, "robot_state", "joint values"),
    "long state": ((), {"robot_state": json.dumps([0.0] * 9)}, 400, "robot_state", "1 to 8"),
    "state over the width": ((), {"robot_state": json.dumps([0.0] * 33)}, 400, "robot_state", "32"),
    "state of another shape": ((), {"robot_state": "[[0, 1]]"}, 400, "robot_state", "robot_state"),
    "NaN in the state": ((), {"robot_state": "[1, NaN]"}, 400, "robot_state", "robot_state"),
    "NaN in a state's file": ((picture(), NO_NUMBERS), {"robot_state": None}, 400, "robot_state", "finite"),
    "state twice": ((picture(), npy(np.zeros(8))), {}, 400, "robot_state", "once"),
    "mask without an image": ((), {"image_mask": "[true, true, true]"}, 400, "image_mask", "2 images"),
    "mask of nothing": ((), {"image_mask": "[false, false]"}, 400, "image_mask", "at least one"),
    "no steps": ((), {"num_steps": "0"}, 400, "num_steps", "1"),
    "too many steps": ((), {"num_steps": "21"}, 400, "num_steps", "20"),
    "horizon of a request": ((), {"action_horizon": "20"}, 400, "action_horizon", "action_horizon"),
    "noise of another horizon": ((), {"noise": json.dumps([[0.0] * 32] * 11)}, 400, "noise", "10"),
    "noise of another width": ((), {"noise": "[[0.0]]"}, 400, "noise", "32"),
    "no text": ((), {"text": ""}, 400, "text", "send an instruction"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_request_names_its_field_and_what_is_allowed(case: str, server: Deployment) -> None:
    files, fields, status, field, allowed = BAD[case]
    error = post(server, *files, **fields)
    assert error.status_code == status, error.text
    assert error.json()["error"]["param"] == field and allowed in error.json()["detail"], error.text


# -- commands -------------------------------------------------------------------------------------------------------


def mstarctl(server: Deployment, *words: str, module: str = "mstarctl") -> subprocess.CompletedProcess[str]:
    environment = {**server.environment(), "NO_COLOR": "1"}
    command = [sys.executable, *(("-m", module) if module == "mstarctl" else (module,)), *words]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=LIMIT_S)


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """Write what a robot sends: three pictures and its state."""
    for number, name in enumerate(("base", "wrist_left", "wrist_right")):
        (tmp_path / f"{name}.png").write_bytes(picture(value=50 * number))
    (tmp_path / "state.json").write_text(json.dumps(STATE))
    np.save(tmp_path / "state.npy", np.array(STATE, dtype=np.float32))
    return tmp_path


def asked(seen: Path, cameras: int, state: str) -> list[str]:
    names = ("base", "wrist_left", "wrist_right")[:cameras]
    images = [word for name in names for word in ("--image", str(seen / f"{name}.png"))]
    return ["call", "pi05", *images, "--state", str(seen / state), "--text", "pick up the cup"]


@pytest.mark.parametrize("state", ["state.json", "state.npy"])
def test_call_writes_actions_as_lists(state: str, seen: Path, server: Deployment) -> None:
    out = seen / "actions.json"
    done = mstarctl(server, *asked(seen, 3, state), "--param", "seed=3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    files = [picture(value=50 * number) for number in range(3)]
    expected = actions(post(server, *files, text="pick up the cup", seed="3"))
    np.testing.assert_allclose(json.loads(out.read_text()), expected, atol=1e-5)


def test_a_control_loop_counts_the_deadlines_that_it_missed(seen: Path, server: Deployment) -> None:
    slow = mstarctl(server, *asked(seen, 1, "state.json"), "--rate", "1000", "--ticks", "40", "-o", "json")
    (item,) = json.loads(slow.stdout)["items"]
    assert item["ticks"] == 40 and item["missed"] == item["late"] + item["skipped"] + item["failed"] > 0
    assert item["p50_ms"] > 1 and item["rate_hz"] == 1000
    words = ("--rate", "0.01", "--ticks", "1", "--max-misses", "0")
    kept = mstarctl(server, *asked(seen, 1, "state.json"), *words)
    assert kept.returncode == 0 and "missed    0" in kept.stdout, kept.stdout + kept.stderr
    lost = mstarctl(server, *asked(seen, 1, "state.json"), "--rate", "1000", "--ticks", "9", "--max-misses", "0")
    assert lost.returncode == 8 and "deadlines were missed" in lost.stderr


def test_a_call_without_a_state_says_what_is_missing(seen: Path, server: Deployment) -> None:
    done = mstarctl(
        server, "call", "pi05", "--image", str(seen / "base.png"), "--text", "x", "--out", str(seen / "a.npy")
    )
    assert done.returncode == 2 and "robot_state is missing" in done.stderr
    assert not (seen / "a.npy").exists()


def test_the_example_runs(seen: Path, server: Deployment) -> None:
    words = (
        str(seen / "base.png"),
        str(seen / "wrist_left.png"),
        "pick up the cup",
        ",".join(map(str, STATE)),
        server.url,
    )
    done = mstarctl(server, *words, module=str(REPO / "examples" / "act.py"))
    assert done.returncode == 0 and f"{HORIZON} steps of {DIM} values in the robot's units" in done.stdout, done.stderr
