"""Arrays among the uploads: their use by shape, and every kind of invalid array."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from mstar_core.errors import MstarError, RequestError
from mstar_core.plugin import parse_params
from mstar_core.plugin.processor import MediaPart
from mstar_pi05.params import Params
from mstar_pi05.request.images import fitted, signed
from mstar_pi05.request.uploads import Uploads, sort_uploads

STATE = np.linspace(-1, 1, 8)
CAMERA = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def sent(*files: bytes) -> Uploads:
    return sort_uploads([MediaPart(modality="tensor", data=data) for data in files])


def params(**given: Any) -> Params:
    made: Params = parse_params(Params, given).params
    return made


def test_an_array_says_by_its_axes_what_it_is() -> None:
    noise = np.ones((10, 32), np.float32)
    actual = sent(npy(CAMERA), npy(noise), npy(STATE.astype(np.float32)), npy(CAMERA.transpose(2, 0, 1)))
    joined = actual.joined(params())
    assert np.array_equal(np.array(joined.noise), noise)
    assert joined.robot_state == tuple(STATE.astype(np.float32).astype(float))
    assert len(actual.cameras) == 2
    for number in (0, 1):
        assert np.array_equal(actual.camera(number), CAMERA)


def test_floats_of_a_camera_are_levels_of_the_same_picture() -> None:
    actual = sent(npy((CAMERA / 255).astype(np.float16)), save({"camera": CAMERA / 255.0}))
    for number, tolerance in ((0, 2e-3), (1, 1e-6)):
        floats = actual.camera(number)
        assert floats.dtype == np.float32
        np.testing.assert_allclose(floats, signed(CAMERA), atol=tolerance)


def test_floats_are_fitted_as_tensors_whatever_the_deployment_does_with_levels() -> None:
    floats = sent(npy(CAMERA / 255.0)).camera(0)
    assert np.array_equal(fitted(floats, 28, "pillow"), fitted(floats, 28, "tensor"))
    np.testing.assert_allclose(fitted(floats, 28, "pillow"), fitted(CAMERA, 28, "tensor"), atol=1e-6)


UNREADABLE = "no readable array"


@pytest.mark.parametrize(
    ("file", "status", "said"),
    [
        (npy(STATE)[:-1], 422, UNREADABLE),
        (npy(STATE)[:12], 422, UNREADABLE),
        (npy(np.array([{}])), 422, UNREADABLE),
        (npy(np.zeros(0)), 422, UNREADABLE),
        (npy(np.zeros(3, complex)), 422, UNREADABLE),
        (npy(STATE).replace(b"(8,)", b"(9,)"), 422, UNREADABLE),
        (npy(STATE).replace(b"(8,), ", b"(8, 4611686018427387904), "), 422, UNREADABLE),
        (save({"a": STATE, "b": STATE}), 422, UNREADABLE),
        (b"\x08\0\0\0\0\0\0\0{}", 422, UNREADABLE),
        (npy(np.zeros((2, 3))), 400, "shape [2, 3]"),
        (npy(np.float32(1)), 400, "shape []"),
        (npy(np.zeros((1, 2, 3, 4))), 400, "shape [1, 2, 3, 4]"),
    ],
)
def test_an_array_that_is_none_names_the_upload(file: bytes, status: int, said: str) -> None:
    with pytest.raises(MstarError, match=said.replace("[", r"\[")) as caught:
        sent(npy(CAMERA), file)
    assert caught.value.status == status and caught.value.facts["field"] == "files"
    assert "file 1" in caught.value.public


@pytest.mark.parametrize(
    "camera",
    [
        CAMERA[..., :2],
        CAMERA.astype(np.int64),
        CAMERA.astype(np.float32),
        CAMERA / 255.0 - 0.5,
        np.full((4, 4, 3), np.nan, np.float32),
        np.full((4, 4, 3), np.inf),
    ],
    ids=["axes", "int64", "levels as floats", "signed", "nan", "inf"],
)
def test_a_camera_of_other_numbers_is_refused_by_its_place(camera: np.ndarray) -> None:
    with pytest.raises(RequestError, match="camera image 1") as caught:
        sent(npy(CAMERA), npy(camera)).camera(1)
    assert caught.value.facts["field"] == "files" and caught.value.facts["allowed"]


@pytest.mark.parametrize(
    ("array", "given", "field"),
    [
        (STATE, {"robot_state": [0.0]}, "robot_state"),
        (np.ones((10, 32)), {"noise": [[0.0] * 32]}, "noise"),
        (np.full(8, np.nan), {}, "robot_state"),
        (np.full((10, 32), np.inf), {}, "noise"),
    ],
)
def test_state_and_noise_of_a_file_are_checked_as_those_of_a_field(array: Any, given: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        sent(npy(array)).joined(params(**given))
    assert caught.value.facts["field"] == field


def test_a_second_state_is_of_no_use() -> None:
    with pytest.raises(RequestError, match="file 1"):
        sent(npy(STATE), npy(STATE))
