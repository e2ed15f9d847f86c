"""Requests through conductor, worker and engines: the reference's numbers, and no leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.errors import RequestError

from .conftest import AC_SET, PREPROCESS_SET, SPECS, Golden, Ways, film, gap, npy, picture, png, rows
from .test_ac_predictor import ENERGY, NEAR, ROLLED, STATE

MOVE = [0.01, 0.0, 0.02, 0.0, 0.1, 0.0, 0.3]
POSE = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]


GREY = 0.018
"""One grey level of a pixel, normalised."""


def served(name: str, folder: Path, ranks: int = 1) -> LocalRuntime:
    return LocalRuntime(SPECS[name].bound(folder, SPECS[name].model_kwargs), folder, ranks=ranks)


def ended(bench: Ways, *media: Any, outputs: tuple[str, ...] = ("tensor",), **params: Any) -> RequestOutcome:
    outcome = bench.request(media=media, params=params, outputs=outputs)
    assert outcome.status == "finished", outcome.cause
    return outcome


def same_crop(pre: Golden, model: Golden) -> None:
    """Skip unless the preprocessed frames have the size that the model takes."""
    given, expected = pre.json("config.json")["crop_size"], model.encoder.crop
    if given != expected:
        pytest.skip(
            f"runs when MSTAR_GOLDEN names a set whose frames have {expected} pixels as its {model.folder.name} model; "
            f"not {given}"
        )


def only(outcome: RequestOutcome, port: str) -> Any:
    (value,) = outcome.of(port)
    return value


@pytest.mark.parametrize("row", rows("pixel_values_videos"))
def test_a_clip_in_every_form(row: int, base: Golden, base_bench: Ways) -> None:
    inputs, expected = base.given, base.expected
    clip = npy(inputs["pixel_values_videos"][row])
    assert gap(only(ended(base_bench, clip), "encoder_hidden"), expected["last_hidden_state"][row]) < NEAR
    mean = only(ended(base_bench, clip, pooling="mean"), "pooled")
    assert gap(mean, expected["last_hidden_state"][row].mean(0)) < NEAR
    layers = only(ended(base_bench, clip, layers=[0, 1]), "layer_hidden")
    assert gap(layers[1], expected["encoder_block_0"][row]) < NEAR
    classified = ended(base_bench, clip, task="classify")
    assert gap(only(classified, "logits"), expected["logits"][row]) < NEAR
    assert gap(only(ended(base_bench, clip, pooling="attentive"), "pooled"), expected["pooled"][row]) < NEAR


def test_clips_of_other_lengths(base: Golden, base_bench: Ways) -> None:
    inputs, expected = base.given, base.expected
    long = ended(base_bench, npy(inputs["pixel_values_long"][0]))
    assert gap(only(long, "encoder_hidden"), expected["last_hidden_state_long"][0]) < NEAR
    for row, clip in enumerate(inputs["pixel_values_videos"]):
        single = ended(base_bench, npy(clip[:1]))
        assert gap(only(single, "encoder_hidden"), expected["last_hidden_state_single_frame"][row]) < NEAR
        odd = expected["last_hidden_state_odd_frames"][row]
        tubelets = len(odd) // base.encoder.frame_tokens
        cut = ended(base_bench, npy(clip[: base.encoder.tubelet * tubelets + 1]))
        assert gap(only(cut, "encoder_hidden"), odd) < NEAR


def test_every_block_can_be_looked_behind(base: Golden, base_bench: Ways) -> None:
    names = ["patch_embeddings", *sorted(name for name in base.expected if name.startswith("encoder_block_"))]
    layers = ended(base_bench, npy(base.given["pixel_values_videos"][1]), layers=list(range(len(names))))
    expected = np.stack([base.expected[name][1].numpy() for name in names])
    assert gap(only(layers, "layer_hidden"), expected) < NEAR


def test_what_masks_choose(base: Golden, base_bench: Ways) -> None:
    inputs, expected = base.given, base.expected
    for row, clip in enumerate(inputs["pixel_values_videos"]):
        hidden = only(ended(base_bench, npy(clip)), "encoder_hidden")
        assert gap(hidden[inputs["context_mask"][row]], expected["masked_hidden_state"][row]) < NEAR
        assert gap(hidden[inputs["target_mask"][row]], expected["target_hidden_state"][row]) < NEAR
        masks = {name: inputs[f"{name}_future"][row].tolist() for name in ("context_mask", "target_mask")}
        ahead = ended(base_bench, npy(clip), task="predict", **masks)
        assert gap(only(ahead, "predicted_hidden"), expected["predicted_future"][row]) < NEAR


@pytest.mark.parametrize("index", PREPROCESS_SET.numbers("base_"))
def test_pictures_are_what_the_reference_makes_of_them(index: int, pre: Golden, base: Golden, base_bench: Ways) -> None:
    """A pixel of an image file may differ by one grey level, so the encoder's outputs are only close."""
    same_crop(pre, base)
    sent = [png(frame) for frame in pre.given[f"frames_{index}"]]
    actual = only(ended(base_bench, *sent, num_frames=len(sent)), "encoder_hidden")
    expected = only(ended(base_bench, npy(pre.expected[f"base_{index}"])), "encoder_hidden")
    assert gap(actual, expected) < GREY * 4


@pytest.mark.parametrize("index", PREPROCESS_SET.numbers("ac_"))
def test_frames_of_an_arm_are_what_the_reference_makes_of_them(
    index: int, pre: Golden, ac: Golden, ac_bench: Ways
) -> None:
    same_crop(pre, ac)
    sent = [png(frame) for frame in pre.given[f"frames_{index}"]]
    clip = pre.expected[f"ac_{index}"].transpose(0, 1).contiguous()
    actual, expected = (only(ended(ac_bench, *media), "encoder_hidden") for media in (sent, [npy(clip)]))
    assert gap(actual, expected) < NEAR


@pytest.mark.parametrize("row", rows("pixel_values_videos"))
def test_masked_prediction_and_rollout(row: int, base: Golden, base_bench: Ways) -> None:
    inputs, expected = base.given, base.expected
    clip = npy(inputs["pixel_values_videos"][row])

    def masks(suffix: str = "") -> dict[str, list[int]]:
        return {name: inputs[f"{name}{suffix}"][row].tolist() for name in ("context_mask", "target_mask")}

    plain = ended(base_bench, clip, task="predict")
    assert gap(only(plain, "predicted_hidden"), expected["predicted_default"][row]) < NEAR
    some = ended(base_bench, clip, task="predict", **masks())
    assert gap(only(some, "predicted_hidden"), expected["predicted_masked"][row]) < NEAR
    steps = expected["anticipation_steps"][row]
    ahead = ended(base_bench, clip, task="rollout", horizon=len(steps), **masks("_future"))
    assert gap(np.stack(ahead.of("predicted_hidden")), steps) < NEAR
    assert [item.meta["step"] for item in ahead.items] == list(range(len(steps)))


def test_requests_of_mixed_kinds_at_once(base: Golden, base_bench: Ways) -> None:
    inputs, expected = base.given, base.expected
    clips = [npy(each) for each in inputs["pixel_values_videos"]]
    kinds: list[dict[str, Any]] = [{}, {"pooling": "mean"}, {"task": "classify"}, {"task": "predict"}, {"layers": [0]}]
    asks = [SampleRequest(media=[clips[n % 2]], params=kind, outputs=("tensor",)) for n in range(2) for kind in kinds]
    outcomes = base_bench.ask(*asks)
    assert [outcome.status for outcome in outcomes] == ["finished"] * len(asks)
    for row in range(2):
        first = outcomes[row * len(kinds)]
        assert gap(only(first, "encoder_hidden"), expected["last_hidden_state"][row]) < NEAR


def test_a_video_file_end_to_end(base: Golden, base_bench: Ways) -> None:
    frames = 2 * base.encoder.tubelet
    whole = ended(base_bench, film(16), num_frames=frames)
    assert only(whole, "encoder_hidden").shape[0] == 2 * base.encoder.frame_tokens
    again = ended(base_bench, film(16), num_frames=frames)
    assert np.array_equal(only(again, "encoder_hidden"), only(whole, "encoder_hidden"))


def test_earlier_names_give_bare_floats(base: Golden, base_bench: Ways) -> None:
    clip = npy(base.given["pixel_values_videos"][0])
    outcome = ended(base_bench, clip, outputs=("scalar", "tensor", "video"))
    sent = np.frombuffer(outcome.outputs["video"], "<f4")
    assert set(outcome.outputs) == {"video"}
    assert gap(sent, base.expected["predicted_default"][0].flatten()) < NEAR


def test_frames_and_taught_steps(ac: Golden, ac_bench: Ways) -> None:
    inputs, expected = ac.given, ac.expected
    clip = npy(inputs["clip"][0].transpose(0, 1).contiguous())
    hidden = only(ended(ac_bench, clip), "encoder_hidden")
    assert gap(hidden.reshape(-1, hidden.shape[-1]), expected["encoder_hidden_normalized"][0]) < NEAR
    raw = only(ended(ac_bench, clip, normalize_reps=False), "encoder_hidden")
    assert gap(raw.reshape(-1, raw.shape[-1]), expected["encoder_hidden_raw"][0]) < NEAR
    taught = ended(
        ac_bench, clip, task="predict", actions=inputs["tf_actions"][0].tolist(), states=inputs["tf_states"][0].tolist()
    )
    frames = np.concatenate(taught.of("next_frame"))
    assert gap(frames.reshape(-1, frames.shape[-1]), expected["tf_output_normalized"][0]) < NEAR


def start(ac: Golden, frames: int = 1) -> Any:
    return npy(ac.given["clip"][0].transpose(0, 1)[:frames].contiguous())


@pytest.mark.parametrize("number", range(len(AC_SET.given["roll_actions"])))
def test_one_candidate_is_rolled_out_in_its_cache(number: int, ac: Golden, ac_bench: Ways) -> None:
    inputs, expected = ac.given, ac.expected
    outcome = ended(
        ac_bench,
        start(ac),
        task="rollout",
        actions=inputs["roll_actions"][number].tolist(),
        states=inputs["roll_state0"][0].tolist(),
        goal=inputs["goal_latents"][0].tolist(),
        outputs=("tensor", "scalar"),
    )
    assert gap(np.concatenate(outcome.of("next_frame")), expected["roll_latents"][number]) < ROLLED
    assert gap(np.stack(outcome.of("next_state")), expected["roll_states"][number, 1:]) < STATE
    assert gap(np.concatenate(outcome.of("energies")), expected["roll_energies_per_step"][number]) < ENERGY
    assert only(outcome, "best_index").tolist() == [0]


def test_context_is_read_before_a_rollout(ac: Golden, ac_bench: Ways) -> None:
    inputs, expected = ac.given, ac.expected
    past = ac.json("cases.json")["T0"]
    outcome = ended(
        ac_bench,
        start(ac, past),
        task="rollout",
        context_frames=past,
        actions=inputs["ctx_actions"][1].tolist(),
        states=inputs["ctx_states"][0].tolist(),
    )
    assert gap(np.concatenate(outcome.of("next_frame")), expected["ctx_latents"][1]) < ROLLED
    assert gap(np.stack(outcome.of("next_state")), expected["ctx_states"][1, past:]) < STATE


def test_given_states_and_final_frames(ac: Golden, ac_bench: Ways) -> None:
    inputs, expected = ac.given, ac.expected
    steps = inputs["roll_actions"].shape[1]
    outcome = ended(
        ac_bench,
        start(ac),
        task="rollout",
        actions=inputs["roll_actions"][-1].tolist(),
        state_mode="given",
        states=inputs["roll_given_states"][-1, :steps].tolist(),
        **{"return": ["final_only"]},
    )
    assert gap(only(outcome, "next_frame"), expected["roll_given_latents"][-1, -1:]) < ROLLED


def test_an_uploaded_goal_is_encoded_with_the_start(ac: Golden, ac_bench: Ways) -> None:
    inputs = ac.given
    goal = npy(inputs["clip"][0].transpose(0, 1)[-1:].contiguous())
    outcome = ended(
        ac_bench,
        start(ac),
        goal,
        task="rollout",
        actions=inputs["roll_actions"][0].tolist(),
        states=inputs["roll_state0"][0].tolist(),
        **{"return": ["energies"]},
    )
    assert gap(np.concatenate(outcome.of("energies")), ac.expected["roll_energies_per_step"][0]) < ENERGY
    assert not outcome.of("next_frame")


def test_rollouts_of_different_lengths_share_a_worker(ac: Golden, ac_bench: Ways) -> None:
    inputs, expected = ac.given, ac.expected
    candidates, horizon = inputs["roll_actions"].shape[:2]
    cases = [(n % candidates, 1 + n % horizon) for n in range(7)]
    asks = [
        SampleRequest(
            media=[start(ac)],
            outputs=("tensor",),
            params={
                "task": "rollout",
                "actions": inputs["roll_actions"][candidate, :steps].tolist(),
                "states": inputs["roll_state0"][0].tolist(),
            },
        )
        for candidate, steps in cases
    ]
    for (candidate, steps), outcome in zip(cases, ac_bench.ask(*asks), strict=True):
        assert outcome.status == "finished", outcome.cause
        assert gap(np.concatenate(outcome.of("next_frame")), expected["roll_latents"][candidate, :steps]) < ROLLED


@pytest.mark.parametrize("turns", range(1, 9))
def test_a_client_that_leaves_a_rollout_leaves_nothing(turns: int, ac: Golden, ac_folder: Path) -> None:
    bench = served("vjepa2_ac", ac_folder)
    params = {"task": "rollout", "actions": [MOVE] * 4, "states": [POSE]}
    call = bench.send(SampleRequest(media=[start(ac)], params=params, outputs=("tensor",)))
    for _ in range(turns):
        bench.step()
    bench.cancel(call)
    bench.run()
    assert bench.leaks() == []


def test_nodes_on_two_ranks(ac: Golden, ac_folder: Path) -> None:
    bench = served("vjepa2_ac", ac_folder, ranks=2)
    inputs = ac.given
    outcome = ended(
        bench,
        start(ac),
        task="rollout",
        actions=inputs["roll_actions"][0].tolist(),
        states=inputs["roll_state0"][0].tolist(),
    )
    assert gap(np.concatenate(outcome.of("next_frame")), ac.expected["roll_latents"][0]) < ROLLED
    assert bench.leaks() == []


def test_a_refusal_enters_nothing(ac_folder: Path) -> None:
    bench = served("vjepa2_ac", ac_folder)
    with pytest.raises(RequestError):
        bench.request(media=[picture()], params={"task": "rollout"}, outputs=("tensor",))
    assert bench.leaks() == []
