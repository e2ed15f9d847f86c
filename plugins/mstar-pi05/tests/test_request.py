"""Preprocessing and postprocessing against the reference: text, bins, statistics, joints, images, messages."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mstar_core.errors import RequestError
from mstar_core.plugin.observation import packed, unpacked
from mstar_pi05.deployment import Deployment
from mstar_pi05.request.conversion import actions_to_robot, as_lines, normalise, state_to_model, to_robot, unnormalise
from mstar_pi05.request.images import fit_floats, fit_pillow, fitted, signed
from mstar_pi05.request.observations import read_observation
from mstar_pi05.request.prompt import bins, pieces
from mstar_pi05.robots.specs import ROBOTS
from mstar_pi05.robots.statistics import Moments


def moments(golden: Any, span: Any = "range") -> Moments:
    state = golden.prepost["normalisation"]["norm_stats"]["norm_stats"]["state"]
    low, high = ("mean", "std") if span == "spread" else ("q01", "q99")
    return Moments(span=span, low=tuple(state[low]), high=tuple(state[high]))


def test_prompts_equal_the_reference(golden: Any) -> None:
    for case in golden.prepost["prompt_cases"]:
        actual = pieces(case["text"], np.array(case["state_normalised"]))
        assert [list(piece) for piece in actual] == case["encode_calls"]


def test_prompts_without_state_equal_the_reference(golden: Any) -> None:
    for case in golden.prepost["prompt_cases_without_state"]:
        assert [list(piece) for piece in pieces(case["text"], None)] == case["encode_calls"]


def test_a_bin_holds_its_lower_edge() -> None:
    edges = -1 + np.arange(256) / 128
    assert bins(edges) == list(range(256))
    assert bins(edges - 1e-9) == list(range(-1, 255))
    assert bins(np.array([1.0, 7.0, -1.0000001, -9.0])) == [255, 255, -1, -1]


def test_the_case_of_words_stays() -> None:
    assert pieces("Fold_The\nTowel ", np.zeros(1)) == [("Task: Fold The Towel, State: 128;\nAction: ", True)]


@pytest.mark.parametrize(("span", "name"), [("range", "quantile"), ("spread", "zscore")])
def test_normalisation_equals_the_reference(span: str, name: str, golden: Any) -> None:
    inputs, used = golden.prepost["normalisation"], moments(golden, span)
    actual = normalise(np.array(inputs["state_raw"]), used)
    np.testing.assert_allclose(actual, inputs[f"state_{name}_normalised"], rtol=1e-12, atol=1e-9)
    actual = unnormalise(np.array(inputs["actions_normalised"]), used)
    np.testing.assert_allclose(actual, inputs[f"actions_{name}_unnormalised"], rtol=1e-12, atol=1e-9)


def test_lerobots_rule_leaves_a_range_that_is_not_zero_as_it_is() -> None:
    used = Moments(span="range", low=(0.0, 1.0), high=(2.0, 1.0), epsilon=1e-8, adds=False)
    assert normalise(np.array([1.5, 1.0]), used).tolist() == [0.5, -1.0]
    np.testing.assert_allclose(unnormalise(np.array([0.5, -1.0]), used), [1.5, 1.0])


def test_differences_become_absolute_as_in_the_reference(golden: Any) -> None:
    inputs = golden.prepost["normalisation"]
    mask, state = tuple(inputs["delta_mask"]), np.array(inputs["state_raw"])
    before = np.array(inputs["actions_quantile_unnormalised"])
    width = before.shape[-1]
    actual = to_robot(before, None, state, Deployment(action_dim=width, is_delta=mask))
    np.testing.assert_allclose(actual, inputs["actions_absolute"], atol=1e-9)


def test_aloha_equals_the_reference(golden: Any) -> None:
    inputs = golden.prepost["aloha"]
    np.testing.assert_allclose(state_to_model(np.array(inputs["state_in"])), inputs["state_out"], atol=1e-9)
    np.testing.assert_allclose(actions_to_robot(np.array(inputs["actions_in"])), inputs["actions_out"], atol=1e-9)


def test_a_gripper_out_of_reach_is_clipped() -> None:
    state = np.zeros(14)
    state[6] = -0.01844 / (0.05800 - 0.01844)  # a travel of nothing
    assert np.isfinite(state_to_model(state)).all()


@pytest.mark.parametrize("robot", [None, "aloha"])
def test_the_way_to_the_robot_is_one_factor_and_one_term(robot: str | None) -> None:
    """Statistics, differences, signs and grippers together, applied in float32 at the end of the flow."""
    random = np.random.default_rng(5)
    low = random.normal(size=14)
    used = Moments(span="range", low=tuple(low), high=tuple(low + random.uniform(0.5, 2, 14)))
    known = ROBOTS[robot] if robot else None
    deployment = Deployment(
        action_dim=14, robot=known, mirrors=known is not None, is_delta=known.is_delta if known else ()
    )
    state, actions = random.normal(size=14), random.normal(size=(50, 32))
    factor, term = as_lines(used, state, deployment)
    assert factor.shape == term.shape == (32,)
    expected = to_robot(actions, used, state, deployment)
    np.testing.assert_allclose((actions * factor + term)[:, :14], expected, atol=1e-12)
    narrow = actions.astype(np.float32) * factor.astype(np.float32) + term.astype(np.float32)
    np.testing.assert_allclose(narrow[:, :14], expected, atol=1e-5)


def test_the_servers_resize_equals_the_reference_exactly(golden: Any) -> None:
    cases = load_file(golden.folder / "images.safetensors")
    for name in [name for name in cases if name.startswith("uint8_in")]:
        expected = cases[name.replace("_in_", "_out_")][0].numpy()
        assert np.array_equal(fit_pillow(cases[name][0].numpy(), len(expected)), expected)


def test_the_tensors_resize_equals_the_reference(golden: Any) -> None:
    cases = load_file(golden.folder / "images.safetensors")
    for name in [name for name in cases if name.startswith("float_out")]:
        inputs = cases[name.replace("float_out", "uint8_in")][0].numpy()
        expected = cases[name][0].numpy()
        np.testing.assert_allclose(fit_floats(signed(inputs), len(expected)), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(48, 80), (300, 17), (5, 400), (224, 224)])
def test_both_ways_keep_the_ratio_and_centre_the_image(shape: tuple[int, int]) -> None:
    white = np.full((*shape, 3), 255, dtype=np.uint8)
    for resize in ("pillow", "tensor"):
        actual = signed(fitted(white, 224, resize))
        assert actual.shape == (224, 224, 3)
        inside = (actual > 0).all(-1)
        assert inside.any(0).all() or inside.any(1).all()  # one direction is filled
        assert ((actual == 1) | (actual == -1)).all()


def test_float_resize_is_torchs(golden: Any) -> None:
    """Compare with the library."""
    random = np.random.default_rng(1).uniform(-1, 1, (37, 91, 3)).astype(np.float32)
    side = 56
    height = int(37 / (91 / side))
    channels_first = torch.from_numpy(random).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(channels_first, (height, side), mode="bilinear", align_corners=False)
    top = (side - height) // 2
    actual = fit_floats(random, side)[top : top + height]
    np.testing.assert_allclose(actual, expected[0].permute(1, 2, 0).numpy(), atol=1e-5)


# -- messages of robots ---------------------------------------------------------------------------------------------


def test_the_message_equals_the_reference(golden: Any) -> None:
    inputs = golden.prepost["msgpack"]
    data, content = base64.b64decode(inputs["base64"]), inputs["content"]
    actual = unpacked(data)
    state, image = actual["observation/state"], actual["observation/image"]
    assert (state.dtype.str, state.tolist()) == ("<f4", content["observation/state"])
    assert image.dtype.str == "|u1" and np.array_equal(image, np.arange(image.size).reshape(image.shape))
    assert (actual["prompt"], actual["scalar"]) == (content["prompt"], content["scalar"])
    assert packed(actual) == data


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype="<f4").reshape(2, 3).T,
        np.zeros((0, 3), "<i8"),
        np.array("say", dtype=str),
        np.float32(0.5),
        np.bool_(True),
        np.array(3),
        {"a": [1, {"b": np.ones(2)}]},
        [None, "x", 1.5, b"raw"],
    ],
)
def test_a_message_comes_back_as_it_went(value: Any) -> None:
    actual = unpacked(packed(value))
    np.testing.assert_equal(actual, value)
    assert getattr(actual, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize(
    "change",
    [
        {b"dtype": "|O"},
        {b"dtype": "<c8"},
        {b"dtype": "|V4"},
        {b"dtype": "f4,f4"},
        {b"dtype": 4},
        {b"dtype": "<f9"},
        {b"shape": [3]},
        {b"shape": [-2, -1]},
        {b"shape": [2.0]},
        {b"shape": None},
        {b"shape": [1] * 40},
        {b"data": b"\0" * 7},
        {b"data": "text"},
        {b"shape": [2**40, 2**40]},
    ],
)
def test_an_array_that_is_none_is_refused_by_its_place(change: dict[bytes, Any]) -> None:
    import msgspec

    array = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2], **change}
    with pytest.raises(RequestError) as caught:
        unpacked(msgspec.msgpack.encode({"state": array}))
    assert caught.value.field == "observation/state"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x82\xa1a", b"\x91" * 5000])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        unpacked(data)


def test_what_the_protocol_has_no_word_for_is_not_sent() -> None:
    for value in (np.array([{}], dtype=object), np.zeros(2, complex)):
        with pytest.raises(RequestError):
            packed({"x": value})


def picture(value: int = 7) -> Any:
    return np.full((4, 6, 3), value, dtype=np.uint8)


def test_aloha_cameras_are_found_as_in_the_reference(golden: Any) -> None:
    inputs = golden.prepost["aloha"]
    images = {name: picture().transpose(2, 0, 1) for name in inputs["images_given"]}
    observation = read_observation({"images": images, "state": np.array(inputs["state_in"]), "prompt": "go"}, "aloha")
    assert list(observation.mask) == list(inputs["image_masks"].values())
    assert len(observation.images) == len(inputs["images_given"])
    assert observation.images[0].shape == (4, 6, 3)
    assert observation.state == tuple(inputs["state_in"])


def test_droid_and_libero_observations_are_read() -> None:
    droid = {
        "observation/exterior_image_1_left": picture(1),
        "observation/wrist_image_left": picture(2),
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": 0.5,
        "prompt": b"close",
    }
    observation = read_observation(droid, "droid")
    assert (observation.state, observation.mask, observation.prompt) == (
        (0, 1, 2, 3, 4, 5, 6, 0.5),
        (True, True, False),
        "close",
    )
    libero = {
        "observation/image": picture() / 255.0,
        "observation/wrist_image": picture(),
        "prompt": np.array("stack"),
        "observation/state": np.zeros(8, "<f4"),
    }
    observation = read_observation(libero, "libero")
    assert (len(observation.state), observation.prompt) == (8, "stack")
    assert np.abs(observation.images[0].astype(int) - picture().astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("robot", "size", "expected"),
    [
        (None, 2, "images (a map of base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb), state (2 values) and prompt"),
        ("libero", 8, "observation/image, observation/wrist_image, observation/state (8 values) and prompt"),
    ],
)
def test_other_keys_are_answered_with_those_that_are_expected(robot: str | None, size: int, expected: str) -> None:
    sent = {"observation/exterior_image_1_left": picture(), "observation/joint_position": np.zeros(7), "prompt": "go"}
    with pytest.raises(RequestError) as caught:
        read_observation(sent, robot, size)
    assert caught.value.hint == f"send {expected}" and "exterior" not in str(caught.value)


@pytest.mark.parametrize(
    ("robot", "change", "field"),
    [
        ("aloha", {"images": {}}, "cam_high"),
        ("aloha", {"images": {"cam_hi": picture()}}, "images"),
        ("aloha", {"images": picture()}, "images"),
        ("aloha", {"state": None}, "state"),
        ("aloha", {"state": ["x"]}, "state"),
        ("aloha", {"state": [float("nan")]}, "state"),
        ("aloha", {"prompt": 7}, "prompt"),
        ("aloha", {"images": {"cam_high": np.zeros((4, 4, 1))}}, "cam_high"),
        ("aloha", {"images": {"cam_high": np.zeros((4, 4, 3), np.int64)}}, "cam_high"),
        ("arx", {}, "robot"),
    ],
)
def test_a_wrong_observation_is_refused_by_its_key(robot: str, change: dict[str, Any], field: str) -> None:
    inputs = {"images": {"cam_high": picture()}, "state": np.zeros(14), "prompt": "go", **change}
    with pytest.raises(RequestError) as caught:
        read_observation(inputs, robot)
    assert caught.value.field == field
