"""Responses to invalid clips and movements over HTTP: field, limit, and no leaks."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load

from mstar_core.plugin.processor import MediaPart

from .conftest import AC_SET, BASE_SET, film, npy, picture
from .server import AC as AC_SERVED
from .server import Server, outcome_of
from .test_ac_processor import MOVE, POSE, rolling

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CLIP = film(8)
CUT = MediaPart(modality="video", data=CLIP.data[: len(CLIP.data) // 3], name="a.mp4")
BASE, AC = BASE_SET.encoder, AC_SET.encoder
"""Encoders of the served models; the set gives their sizes."""

SMALL = npy(np.zeros((4, 3, BASE.crop // 2, BASE.crop // 2), np.float32))
MOST = AC_SET.sizes.most_frames
TOKENS = BASE.tokens(min(8, BASE.clip_frames))
"""Tokens of CLIP. All of its frames are used up to the model's own number."""


def empty_png(width: int, height: int) -> MediaPart:
    """Return a small file with a huge number of pixels."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return MediaPart(modality="image", data=file.getvalue(), name="a.png")


def nan_clip() -> MediaPart:
    pixels = np.zeros((4, 3, BASE.crop, BASE.crop), np.float32)
    pixels[0, 0, 0, 0] = math.nan
    return npy(pixels)


def check(server: Server, media: Any, params: dict[str, Any], status: int, field: str, words: str) -> None:
    answer = server.post(media, params, streaming="false")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, answer.text
    assert re.search(words, error["message"]), answer.text


@pytest.mark.parametrize(
    ("media", "params", "status", "field", "words"),
    [
        ([], {}, 400, "files", "no input"),
        ([CUT], {}, 422, "files", "cannot be decoded"),
        ([film(4)], {"num_frames": 5}, 400, "num_frames", "is 5, the clip has 4"),
        ([CLIP], {"num_frames": 0}, 400, "num_frames", ">= 1"),
        ([film(8, rate=10)], {"fps": 30}, 400, "fps", "10 frames a second"),
        ([CLIP], {"fps": 2, "num_frames": 4}, 400, "fps", "both"),
        ([CLIP, CLIP], {}, 400, "video", "2 files"),
        ([empty_png(30_000, 30_000)], {}, 413, "image|files|file", "30000|pixels"),
        ([SMALL], {}, 400, "tensor", rf"\[frames, 3, {BASE.crop}, {BASE.crop}\]"),
        ([nan_clip()], {}, 400, "tensor", "NaN"),
        ([CLIP], {"task": "rollout", "horizon": 0}, 400, "horizon", ">= 1"),
        ([CLIP], {"task": "rollout", "horizon": 257}, 400, "horizon", "<= 256"),
        ([CLIP], {"layers": [BASE.vit.layers + 1]}, 400, "layers", f"has {BASE.vit.layers} blocks"),
        (
            [CLIP],
            {"task": "predict", "context_mask": [TOKENS], "target_mask": [0]},
            400,
            "context_mask",
            f"0 to {TOKENS - 1}",
        ),
        ([CLIP], {"task": "predict", "context_mask": [-1], "target_mask": [0]}, 400, "context_mask", ">= 0"),
        ([CLIP], {"actions": [MOVE]}, 400, "actions", "unknown parameter"),
    ],
)
def test_a_wrong_clip_is_answered_by_its_field(
    media: Any, params: dict[str, Any], status: int, field: str, words: str, base_server: Server
) -> None:
    answer = base_server.post(media, params, streaming="false")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert re.fullmatch(field, error["param"]), answer.text
    assert re.search(words, error["message"]), answer.text


def test_a_clip_of_more_tokens_than_a_sequence_holds_is_too_long(base_server: Server) -> None:
    limit = base_server.deployment.spec().max_seq_len
    frames = BASE.tubelet * (limit // BASE.frame_tokens + 1)
    pixels = np.zeros((frames, 3, BASE.crop, BASE.crop), np.uint8)
    check(base_server, [npy(pixels)], {}, 413, "num_frames", str(limit))


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"actions": None}, "actions", "missing"),
        ({"actions": []}, "actions", "table"),
        ({"actions": [MOVE[:6]] * 2}, "actions", r"\[n, 7\]"),
        ({"actions": [MOVE, MOVE[:6]]}, "actions", "table"),
        ({"actions": [[[MOVE]]]}, "actions", r"\[n, n, 7\]"),
        ({"actions": [["left"] * 7]}, "actions", "left"),
        ({"actions": [[1e39] * 7] * 2}, "actions", "float32"),
        ({"actions": [[MOVE]] * 513, "goal_hidden_fill": 0.0}, "actions", "allowed are 512"),
        ({"states": None}, "states", "missing"),
        ({"states": [POSE[:6]]}, "states", r"\[n, 7\]"),
        ({"states": [POSE] * 2}, "states", "2 frames, needed are 1"),
        ({"states": [[POSE]] * 3}, "states", "3 candidates, actions 1"),
        ({"state_mode": "given"}, "states", "1 frames, needed are 2"),
        ({"horizon": 0}, "horizon", ">= 1"),
        ({"horizon": 3}, "actions", "have 2 steps, needed are 3"),
        ({"actions": [MOVE] * (MOST + 1)}, "horizon", f"is {MOST + 1}, allowed is <= {MOST}"),
        ({"context_frames": 2, "states": [POSE] * 2}, "context_frames", "2 frames, 1 were sent"),
        ({"goal": [[0.0] * AC.vit.width] * (AC.frame_tokens - 1)}, "goal", rf"\[{AC.frame_tokens}, {AC.vit.width}\]"),
        ({"return": ["energies"]}, "goal", "needs a goal"),
        ({"return": ["pixels"]}, "return", "pixels"),
        ({"cost": "l3"}, "cost", "l1"),
        ({"extrinsics": [[0.0] * 6] * 2}, "extrinsics", "no effect"),
        ({"task": "plan", "goal_hidden_fill": 0.0, "topk": 9, "samples": 8}, "topk", "above samples 8"),
        ({"task": "plan", "goal_hidden_fill": 0.0, "topk": 1}, "topk", ">= 2"),
        (
            {"task": "plan", "goal_hidden_fill": 0.0, "horizon": MOST + 1},
            "horizon",
            f"is {MOST + 1}, allowed is <= {MOST}",
        ),
        ({"task": "plan", "goal_hidden_fill": 0.0, "maxnorm": 0}, "maxnorm", "> 0"),
        ({"task": "plan"}, "goal", "needs a goal"),
        ({"seed": -1}, "seed", ">= 0|0"),
    ],
)
def test_wrong_movements_are_answered_by_their_field(
    change: dict[str, Any], field: str, words: str, ac_server: Server
) -> None:
    asked = {name: value for name, value in {**rolling(2), **change}.items() if value is not None}
    check(ac_server, [picture()], asked, 400, field, words)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["actions", "states"])
def test_numbers_that_are_none_are_refused(field: str, value: str, ac_server: Server) -> None:
    asked = json.dumps(rolling(2)).replace(json.dumps(rolling(2)[field]), f"[[{', '.join([value] * 7)}]]")
    answer = ac_server.post([picture()], {}, model_kwargs=asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in (field, "model_kwargs"), answer.text


@pytest.mark.parametrize(
    "clip",
    [
        film(8, rate=Fraction(24000, 1001)),
        film(8, rate=7),
        film(8, 32, 96),
        film(8, 96, 32),
        film(8, pix_fmt="gray"),
        film(8, codec="libvpx-vp9", form="webm", pix_fmt="yuva420p"),
        film(1),
        film(3),
        picture(mode="L"),
        picture(mode="RGBA"),
        picture(mode="LA"),
        picture(mode="I;16"),
        picture(9, 200),
        picture(1, 1),
    ],
    ids=[
        "ntsc",
        "7 fps",
        "portrait",
        "wide",
        "grey clip",
        "alpha clip",
        "one frame",
        "odd",
        "grey",
        "alpha",
        "grey alpha",
        "16 bits",
        "narrow",
        "one pixel",
    ],
)
def test_odd_clips_and_pictures_are_read(clip: MediaPart, base_server: Server) -> None:
    answer = base_server.post([clip], {"pooling": "mean"}, streaming="true")
    assert answer.status_code == 200, answer.text
    (pooled,) = outcome_of(answer.text).of("pooled")
    assert np.isfinite(pooled).all() and float(pooled.std()) > 0.01


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_form_holds_the_same_numbers(dtype: str, base_server: Server) -> None:
    def asked(form: str) -> tuple[bytes, dict[str, Any]]:
        params = {"pooling": "mean_space", "output_format": form, "output_dtype": dtype}
        (entry,) = base_server.post([CLIP], params, streaming="false").json()["outputs"]["tensor"]
        return base64.b64decode(entry["data"]), entry["metadata"]

    raw, facts = asked("raw")
    expected = np.frombuffer(raw, facts["dtype"]).reshape(facts["shape"])
    times = TOKENS // BASE.frame_tokens
    assert (facts["dtype"], facts["crop"], facts["grid"]) == (dtype, BASE.crop, [times, BASE.grid, BASE.grid])
    assert expected.shape == (times, BASE.vit.width)
    assert np.array_equal(np.load(io.BytesIO(asked("npy")[0])), expected)
    assert np.array_equal(load(asked("safetensors")[0])["pooled"], expected)
    assert np.allclose(json.loads(asked("json")[0]), expected)


@pytest.mark.parametrize("name", ["encode", "rollout", "plan"])
def test_the_examples_run(name: str, base_server: Server, ac_server: Server, tmp_path: Path) -> None:
    for part, file in ((CLIP, "clip.mp4"), (picture(), "start.png"), (picture(64, 40), "goal.png")):
        (tmp_path / file).write_bytes(part.data)
    server, files = (base_server, ["clip.mp4"]) if name == "encode" else (ac_server, ["start.png", "goal.png"])
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), *files, server.deployment.url]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    times = TOKENS // BASE.frame_tokens
    grid = f"{times} times, {BASE.grid} rows, {BASE.grid} columns"
    expected = {"encode": grid, "rollout": "nearest at the end", "plan": "action 1: move"}
    assert expected[name] in said


def test_candidates_that_never_fit_together_are_refused_before_they_begin(ac_server: Server) -> None:
    """Scored candidates need all their pages at once; without a goal they take turns, and usage reports their cost."""
    pages, frame = AC_SERVED.settings["kv_cache"].pages, AC_SET.sizes.conditions + AC.frame_tokens
    count = pages // MOST + 1
    needed = count * MOST
    asked = {**rolling(MOST, count), "return": ["final_only"]}
    answer = ac_server.post([picture(), picture()], {**asked, "return": ["energies"]}, streaming="false")
    assert answer.status_code == 413, answer.text
    said = answer.json()["error"]["message"]
    expected = f"never fit.*{count} candidates need {needed:,} pages of {pages:,}; ask for less"
    assert re.search(expected.replace(",", ",?"), said), answer.text
    assert ac_server.leaks() == []
    usage = ac_server.post([picture()], asked, streaming="false").json()["usage"]
    assert (usage["encoder_tokens"], usage["steps"]) == (AC.frame_tokens, MOST)
    assert usage["predictor_tokens"] == needed * frame
