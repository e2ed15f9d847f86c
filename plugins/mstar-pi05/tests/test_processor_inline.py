"""Requests that the api's own loop prepares: cameras in the model's format, without long blocking."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.errors import MstarError
from mstar_core.plugin import parse_params
from mstar_core.plugin.observation import packed
from mstar_core.plugin.processor import InlineProcessor, MediaPart, PromptRequest
from mstar_core.workloads.media import png
from mstar_pi05.params import Params
from mstar_pi05.processor import INLINE_BYTES, Processor
from mstar_pi05.request.uploads import MOST_FILES, SMALL_BYTES

SIDE = 28
STATE = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]
CAMERA = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
LARGE = np.zeros((SIDE * 4, SIDE * 4, 3), np.uint8)
HELD_S = 0.03
"""Maximum time that one request may block the loop: a valid one takes a millisecond, a hostile one a few."""


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(said: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """Return a file with a custom header."""
    size = len(said).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + said + data


def uploaded(*files: bytes, text: str = "pick it up", state: list[float] | None = STATE) -> PromptRequest:
    params = parse_params(Params, {} if state is None else {"robot_state": state}).params
    media = [MediaPart(modality="tensor", data=data) for data in files]
    return PromptRequest(text=text, media=media, params=params, seed=3, max_seq_len=1024)


def observed(**given: Any) -> PromptRequest:
    seen = {"images": {"base_0_rgb": CAMERA}, "state": np.array(STATE), "prompt": "pick it up", **given}
    return message(packed({key: value for key, value in seen.items() if value is not None}))


def message(data: bytes) -> PromptRequest:
    return PromptRequest(text=None, observation=data, params=Params(), seed=3, max_seq_len=1024)


@pytest.fixture
def processor(tiny_folder: Path) -> Processor:
    made = Processor(tiny_folder, {})
    made.warm_up()
    return made


def test_the_api_takes_it_for_one_of_its_own(processor: Processor) -> None:
    assert isinstance(processor, InlineProcessor)


def test_a_robot_that_sends_what_the_model_takes_is_quick(processor: Processor, tmp_path: Path) -> None:
    noise = np.ones((10, 32), np.float32)
    assert processor.is_inline(uploaded(*[npy(CAMERA)] * 3))
    assert processor.is_inline(uploaded(npy(CAMERA), npy(noise), npy(np.array(STATE)), state=None))
    assert processor.is_inline(observed())
    assert processor.is_inline(observed(images={name: CAMERA for name in ("base_0_rgb", "left_wrist_0_rgb")}))


@pytest.mark.parametrize(
    "request_",
    [
        uploaded(png(CAMERA)),
        uploaded(npy(LARGE)),
        uploaded(npy(LARGE.astype(np.float32))),
        uploaded(b""),
        uploaded(npy(CAMERA), text="go " * INLINE_BYTES),
        uploaded(*[npy(CAMERA)] * (MOST_FILES + 1)),
        uploaded(header(b" " * 300 + b"\n", bytes(100))),
        uploaded(header(b"{}", version=b"\x02\x00")),
        observed(prompt="go " * INLINE_BYTES),
        observed(images={"base_0_rgb": LARGE}),
        observed(prompt=np.array("go " * INLINE_BYTES)),
        observed(state=np.full(4 * INLINE_BYTES, b"1")),
        observed(more=[[]] * INLINE_BYTES),
        observed(images={"base_0_rgb": CAMERA.astype(np.int8)}),
        message(b""),
        message(b"\x81" * 3000),
        message(b"\xc1" * 3000),
        message(packed({str(number): {} for number in range(3000)})),
    ],
)
def test_everything_else_is_left_to_a_process(processor: Processor, request_: PromptRequest) -> None:
    if request_.observation == b"":
        assert processor.is_inline(request_)  # and is refused at once
    else:
        assert not processor.is_inline(request_)


def test_a_quick_observation_gives_the_same_arrays_as_any_other(processor: Processor) -> None:
    quick, other = observed(), observed(more=[[]] * INLINE_BYTES)
    actual, same = (processor.process_prompt(request).arrays for request in (quick, other))
    assert all(np.array_equal(actual[name], same[name]) for name in actual)


HOSTILE = {
    "tuples": uploaded(*[header(b"(" * 90 + b")" * 90, bytes(2000))] * MOST_FILES),
    "axes": uploaded(*[header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"1," * 90 + b")}", b"1")] * 5),
    "objects": uploaded(header(b"{'descr': '|O', 'fortran_order': False, 'shape': (9,), }", bytes(72))),
    "huge": uploaded(
        header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (28, 28, 461168601842738790), }", b"1")
    ),
    "claims a camera": uploaded(
        header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (28, 28, 3), }" + b" " * 50, bytes(900))
    ),
    "not a number": uploaded(npy(np.full((9, 9, 3), np.nan, np.float32))),
    "state of nothing": uploaded(npy(CAMERA), npy(np.array([np.inf] * 8)), state=None),
    "long state": uploaded(npy(CAMERA), npy(np.ones(SMALL_BYTES - 128, np.uint8)), state=None),
    "long noise": uploaded(npy(CAMERA), npy(np.ones((SMALL_BYTES // 32 - 4, 32), np.uint8))),
    "one pixel": uploaded(*[npy(np.ones((1, 1, 3), np.float32))] * 3),
    "a strip": uploaded(*[npy(np.ones((3, 1, 5000), np.uint8))] * 3),
    "a state like a camera": observed(state=CAMERA),
    "words like numbers": observed(state=np.full(INLINE_BYTES // 2, b"1")),
    "no picture": observed(images={"base_0_rgb": np.zeros((0, 0, 3), np.uint8)}),
    "a list": message(packed([[]] * 100)),
    "a lie": message(
        packed(
            {"images": {"base_0_rgb": {b"__ndarray__": True, b"data": b"1", b"dtype": "|u1", b"shape": [28, 28, 3]}}}
        )
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_is_quick_holds_the_loop(processor: Processor, name: str) -> None:
    taken = []
    for _ in range(3):
        begun = time.thread_time()
        assert processor.is_inline(HOSTILE[name])
        try:
            processor.process_prompt(HOSTILE[name])
        except MstarError as error:
            assert error.status < 500
        taken.append(time.thread_time() - begun)
    assert min(taken) < HELD_S
