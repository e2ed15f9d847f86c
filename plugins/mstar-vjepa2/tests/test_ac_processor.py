"""Processor of V-JEPA 2-AC: valid requests to arrays, and errors for invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin import parse_params
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_vjepa2.ac_processor import ActionProcessor
from mstar_vjepa2.graph import MOST_SCORED
from mstar_vjepa2.params import ActionParams

from .conftest import film, npy, picture

CROP, FRAME, WIDTH = 32, 16, 48
PIXELS = "pixel_values_videos"
MOVE = [0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
POSE = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]


@pytest.fixture(scope="module")
def processor(tiny_ac: Path) -> ActionProcessor:
    return ActionProcessor(tiny_ac, {})


def ask(processor: Any, *media: MediaPart, outputs: str = "tensor", **params: Any) -> Inputs:
    request = PromptRequest(
        text=None, media=media, params=parse_params(ActionParams, params).params, outputs=frozenset({outputs})
    )
    made: Inputs = processor.process_prompt(request)
    return made


def refused(processor: Any, *media: MediaPart, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        ask(processor, *media, **params)
    return error.value


def rolling(steps: int = 2, candidates: int | None = None, **more: Any) -> dict[str, Any]:
    one = [MOVE] * steps
    return {"task": "rollout", "actions": one if candidates is None else [one] * candidates, "states": [POSE], **more}


PLAN = {"task": "plan", "states": [POSE], "samples": 6, "topk": 2, "cem_steps": 3, "goal_hidden_fill": 0.0}


def shapes(made: Inputs) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in made.arrays.items()}


def test_every_frame_of_a_clip_is_encoded(processor: ActionProcessor) -> None:
    actual = ask(processor, film(5))
    assert shapes(actual) == {PIXELS: (5, 3, CROP, CROP)}
    assert actual.arrays[PIXELS].dtype == np.float32 and actual.prompt_tokens == 5 * FRAME
    assert shapes(ask(processor, picture(), picture(64, 40))) == {PIXELS: (2, 3, CROP, CROP)}
    assert ask(processor, npy(np.zeros((2, 3, CROP, CROP), np.uint8))).arrays[PIXELS].min() < -1.5, "normalised here"


@pytest.mark.parametrize("given", [PLAN, rolling()])
def test_one_state_is_read_without_its_list(given: dict[str, Any], processor: ActionProcessor) -> None:
    listed = ask(processor, picture(), **given).arrays["state"]
    assert np.array_equal(ask(processor, picture(), **{**given, "states": POSE}).arrays["state"], listed)
    error = refused(processor, picture(), **{**given, "states": POSE[:6]})
    assert error.field == "states" and "shape [6], allowed is [7] or [n, 7]" in error.title


def test_more_frames_than_the_model_knows_are_refused(processor: ActionProcessor) -> None:
    error = refused(processor, film(33))
    assert isinstance(error, TooLarge) and error.field == "video" and "33 frames" in error.title


def test_known_frames_take_known_movements(processor: ActionProcessor) -> None:
    taught = {"task": "predict", "actions": [MOVE] * 3, "states": [POSE] * 3}
    actual = ask(processor, film(4), **taught)
    assert shapes(actual) == {PIXELS: (3, 3, CROP, CROP), "given_actions": (3, 7), "given_states": (3, 7)}
    assert "first 3" in actual.warnings[0]
    assert refused(processor, film(2), **taught).field == "actions"
    assert refused(processor, film(3), **{**taught, "states": [POSE] * 2}).field == "states"
    assert refused(processor, film(3), **{**taught, "actions": [[MOVE] * 3]}).field == "actions"
    assert refused(processor, film(3), task="predict", actions=[MOVE] * 3).field == "states"
    assert refused(processor, film(3), task="predict").field == "actions"
    assert refused(processor, picture(), picture(), **taught).field == "actions"


def test_a_rollout_starts_from_one_frame(processor: ActionProcessor) -> None:
    actual = ask(processor, film(4), **rolling(3))
    assert shapes(actual) == {PIXELS: (1, 3, CROP, CROP), "state": (7,), "actions": (3, 7)}
    many = ask(processor, picture(), **rolling(2, 5))
    assert shapes(many) == {PIXELS: (1, 3, CROP, CROP), "state": (7,), "actions": (5, 2, 7)}
    own = ask(processor, picture(), **{**rolling(2, 5), "states": [[POSE]] * 5})
    assert shapes(own)["state"] == (5, 7)
    one = ask(processor, picture(), **{**rolling(3, 1), "states": [[POSE]]})
    assert shapes(one) == shapes(actual), "one candidate is a request of one row, however it is written"


def test_a_shorter_horizon_cuts_the_actions(processor: ActionProcessor) -> None:
    actions = ask(processor, picture(), **rolling(5, horizon=2)).arrays["actions"]
    assert actions.shape == (2, 7) and actions[:, 0].all()


def test_context_is_split_from_what_is_rolled_out(processor: ActionProcessor) -> None:
    moves = [[0.01 * index] * 7 for index in range(4)]
    actual = ask(processor, film(6), task="rollout", context_frames=3, actions=moves, states=[POSE] * 3)
    assert shapes(actual) == {
        PIXELS: (1, 3, CROP, CROP),
        "state": (7,),
        "actions": (2, 7),
        "context": (2, 3, CROP, CROP),
        "past_actions": (2, 7),
        "past_states": (2, 7),
    }
    assert np.allclose(actual.arrays["past_actions"][:, 0], [0.0, 0.01]) and actual.arrays["actions"][
        0, 0
    ] == np.float32(0.02)
    darker = actual.arrays["context"].mean(axis=(1, 2, 3))
    assert darker[0] < darker[1] < actual.arrays[PIXELS].mean(), "frames keep their order"


def test_given_states_go_with_their_frames(processor: ActionProcessor) -> None:
    poses = [[0.1 * index] * 7 for index in range(4)]
    actual = ask(
        processor, film(6), task="rollout", context_frames=2, actions=[MOVE] * 4, states=poses, state_mode="given"
    )
    assert shapes(actual)["states"] == (3, 7)
    assert np.allclose(actual.arrays["past_states"][:, 0], [0.0]) and np.allclose(actual.arrays["state"][0], 0.1)


def test_candidates_have_one_past(processor: ActionProcessor) -> None:
    one, other = [MOVE] * 3, [[0.02] * 7] + [MOVE] * 2
    two = {"task": "rollout", "context_frames": 2, "states": [POSE] * 2}
    assert ask(processor, film(2), actions=[one, one], **two).arrays
    assert refused(processor, film(2), actions=[one, other], **two).field == "actions"
    poses = [[POSE] * 2, [[0.0] * 7, POSE]]
    assert refused(processor, film(2), **{**two, "actions": [one, one], "states": poses}).field == "states"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"actions": None}, "actions"),
        ({"states": None}, "states"),
        ({"actions": [[0.0] * 6]}, "actions"),
        ({"actions": [[float("nan")] * 7]}, "actions"),
        ({"actions": [[1e300] * 7]}, "actions"),
        ({"states": [[float("inf")] * 7]}, "states"),
        ({"states": [POSE] * 2}, "states"),
        ({"states": [[POSE]] * 2, "actions": [[MOVE]] * 3}, "states"),
        ({"horizon": 3}, "actions"),
        ({"horizon": 0}, "horizon"),
        ({"horizon": 257}, "horizon"),
        ({"context_frames": 2, "states": [POSE] * 2}, "context_frames"),
        ({"extrinsics": [[0.0] * 6] * 2}, "extrinsics"),
        ({"goal": [[0.0] * WIDTH] * 3}, "goal"),
        ({"goal": [[0.0] * WIDTH] * FRAME, "goal_hidden_fill": 1.0}, "goal_hidden_fill"),
        ({"return": ["energies"]}, "goal"),
        ({"mpc": True}, "goal"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused(change: dict[str, Any], field: str, processor: ActionProcessor) -> None:
    asked = {name: value for name, value in {**rolling(2), **change}.items() if value is not None}
    assert refused(processor, picture(), **asked).field == field


def test_earlier_names_are_held_to_the_same_rules(processor: ActionProcessor) -> None:
    assert refused(processor, picture(), mpc=True, rollout_horizon=2, goal_hidden_fill=0.0).field == "actions"
    actual = ask(
        processor, picture(), mpc=True, rollout_horizon=2, goal_hidden_fill=0.5, actions=[[MOVE] * 2] * 3, states=[POSE]
    )
    assert shapes(actual)["goal_latents"] == (FRAME, WIDTH) and float(actual.arrays["goal_latents"][0, 0]) == 0.5


def test_a_checkpoint_knows_fewer_frames_than_the_released_one(ac_folder: Path, ac: Any) -> None:
    own = ActionProcessor(ac_folder, {})
    most = ac.json("config.json")["ac_predictor"]["max_latent_frames"]
    assert refused(own, picture(), **rolling(most + 1)).field == "horizon"
    assert ask(own, picture(), **rolling(most)).arrays


def test_a_deployment_may_take_longer_rollouts_than_the_checkpoint_says(tiny_ac: Path) -> None:
    longer = ActionProcessor(tiny_ac, {"max_latent_frames": 37})
    assert ask(longer, picture(), **rolling(37)).arrays
    assert "allowed is <= 37" in str(refused(longer, picture(), **rolling(38)))
    assert "allowed is <= 32" in str(refused(ActionProcessor(tiny_ac, {}), picture(), **rolling(33)))


def test_a_rollout_stays_within_the_tokens_of_a_sequence(processor: ActionProcessor) -> None:
    params = parse_params(ActionParams, rolling(9)).params
    tokens = 8 * (FRAME + 2)
    request = PromptRequest(
        text=None, media=[picture()], params=params, outputs=frozenset({"tensor"}), max_seq_len=tokens
    )
    with pytest.raises(RequestError, match="allowed is <= 8") as error:
        processor.process_prompt(request)
    assert error.value.field == "horizon" and f"max_seq_len is {tokens}" in error.value.detail


def test_scored_candidates_are_as_many_as_have_caches_at_once(processor: ActionProcessor) -> None:
    many = rolling(1, MOST_SCORED + 1)
    assert ask(processor, picture(), **many).arrays
    error = refused(processor, picture(), **many, goal_hidden_fill=0.0)
    assert error.field == "actions" and f"allowed are {MOST_SCORED}" in str(error)


def test_a_long_rollout_comes_with_a_warning(processor: ActionProcessor) -> None:
    assert "trained on 8" in ask(processor, picture(), **rolling(17)).warnings[0]
    assert not ask(processor, picture(), **rolling(16)).warnings


def test_goals(processor: ActionProcessor) -> None:
    image = ask(processor, film(3), picture(), **rolling())
    assert shapes(image)["goal_frame"] == (1, 3, CROP, CROP) and image.prompt_tokens == 2 * FRAME
    latents = np.random.default_rng(1).standard_normal((FRAME, WIDTH)).astype(np.float32)
    for inputs in (latents, latents[None]):
        actual = ask(processor, picture(), npy(inputs), **rolling())
        assert np.array_equal(actual.arrays["goal_latents"], latents)
    pixels = np.zeros((1, 3, CROP, CROP), np.float32)
    assert shapes(ask(processor, picture(), npy(pixels), **rolling()))["goal_frame"] == pixels.shape
    named = ask(processor, picture(), **rolling(goal=latents.tolist()))
    assert np.allclose(named.arrays["goal_latents"], latents)


@pytest.mark.parametrize(
    ("media", "task", "field"),
    [
        ((), "rollout", "image"),
        ((picture(), film(2)), "rollout", "goal"),
        ((picture(), npy(np.zeros((2, 3, CROP, CROP), np.float32))), "rollout", "goal"),
        ((picture(), npy(np.zeros((FRAME, WIDTH + 1), np.float32))), "rollout", "goal"),
        ((picture(), picture(), picture()), "rollout", "image"),
        ((film(2), picture()), "encode", "image"),
        ((MediaPart(modality="audio", data=b"RIFF"),), "encode", "audio"),
        ((picture(), film(2)), "encode", "video"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    media: tuple[MediaPart, ...], task: str, field: str, processor: ActionProcessor
) -> None:
    asked = rolling() if task == "rollout" else {"task": task}
    assert refused(processor, *media, **asked).field == field


def test_a_plan_starts_from_its_bounds_and_one_generator(processor: ActionProcessor) -> None:
    actual = ask(processor, picture(), **PLAN, seed=5, axis={"z": 0.02}, close_gripper=1, maxnorm=0.07)
    arrays = actual.arrays
    assert arrays["mean"].tolist() == [[0.0, 0.0, np.float32(0.02), 0.0]] * 2
    assert arrays["std"].tolist() == [[np.float32(0.07)] * 3 + [1.0]] * 2
    assert np.isnan(arrays["fixed_axes"]).tolist() == [True, True, False, True]
    assert arrays["close_from"].tolist() == [1]
    rng = np.random.Generator(np.random.PCG64(5))
    for step in range(3):
        for time in range(2):
            drawn = rng.standard_normal((6, 4), dtype=np.float32)
            assert np.array_equal(arrays["noise"][step, time], drawn), "the order of the official planner"
    other = ask(processor, picture(), **PLAN, seed=6).arrays
    assert not np.array_equal(other["noise"], arrays["noise"]) and other["close_from"][0] > 32


def test_given_noise_takes_the_place_of_drawn(processor: ActionProcessor) -> None:
    noise = np.random.default_rng(3).standard_normal((3, 2, 6, 4)).astype(np.float32)
    actual = ask(processor, picture(), **PLAN, noise=noise.tolist())
    assert np.allclose(actual.arrays["noise"], noise)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"goal_hidden_fill": None}, "goal"),
        ({"states": None}, "states"),
        ({"states": [POSE] * 2}, "states"),
        ({"states": [[POSE]]}, "states"),
        ({"topk": 7}, "topk"),
        ({"topk": 1}, "topk"),
        ({"axis": {"x": float("nan")}}, "axis"),
        ({"axis": {"x": 2.0}}, "axis"),
        ({"noise": [[[[0.0] * 4] * 6] * 2] * 2}, "noise"),
        ({"cem_steps": 1000, "samples": 4096, "horizon": 8}, "cem_steps"),
        ({"horizon": 257}, "horizon"),
        ({"context_frames": 2, "states": [POSE] * 2}, "context_frames"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], field: str, processor: ActionProcessor) -> None:
    asked = {name: value for name, value in {**PLAN, **change}.items() if value is not None}
    assert refused(processor, picture(), **asked).field == field


def test_a_plan_with_context_needs_its_actions(processor: ActionProcessor) -> None:
    with_past = {**PLAN, "context_frames": 3, "states": [POSE] * 3}
    assert refused(processor, film(3), **with_past).field == "actions"
    assert refused(processor, film(3), **with_past, actions=[MOVE]).field == "actions"
    actual = ask(processor, film(3), **with_past, actions=[MOVE] * 2)
    assert shapes(actual)["past_actions"] == (2, 7) and "actions" not in actual.arrays


def test_extrinsics_are_needed_where_they_are_used(ac: Any, tmp_path: Path) -> None:
    from .conftest import lay_out

    config = ac.json("config.json")
    config["ac_predictor"]["use_extrinsics"] = True
    own = ActionProcessor(lay_out(tmp_path / "x", config, ac.tensors("model")), {})
    assert refused(own, picture(), **rolling(2)).field == "extrinsics"
    assert refused(own, picture(), **rolling(2), extrinsics=[[0.0] * 6]).field == "extrinsics"
    actual = ask(own, film(2), **{**rolling(3), "states": [POSE] * 2}, context_frames=2, extrinsics=[[0.1] * 6] * 3)
    assert (shapes(actual)["extrinsics"], shapes(actual)["past_extrinsics"]) == ((2, 6), (1, 6))


def test_what_a_request_costs_is_told(processor: ActionProcessor) -> None:
    """Encoder tokens, predictor tokens of all candidates, and steps of a rollout or plan."""
    each = FRAME + 2
    assert ask(processor, film(3)).usage == {"encoder_tokens": 3 * FRAME, "predictor_tokens": 0}
    rolled = ask(processor, film(3), **{**rolling(4, 5), "states": [POSE] * 2, "context_frames": 2, "horizon": 3}).usage
    assert rolled == {"encoder_tokens": 2 * FRAME, "predictor_tokens": (1 + 5 * 3) * each, "steps": 3}
    planned = ask(processor, picture(), **PLAN).usage
    assert planned == {"encoder_tokens": FRAME, "predictor_tokens": 3 * 6 * 2 * each, "steps": 3}
