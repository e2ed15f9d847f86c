"""The world, training and judge of `vjepa2_ac:mini`, without its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import judge_block
import numpy as np
import torch
import train_block

from mstar_vjepa2 import block
from mstar_vjepa2.checkpoint import names
from mstar_vjepa2.checkpoint.loading import Source, fill
from mstar_vjepa2.model import AC_RULES
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import Encoder

STEPS = 2


def options(**changes: object) -> argparse.Namespace:
    given = {"device": "cpu", "seed": 1, "minutes": 1.0, "steps": STEPS, "batch": 8, "rate": 1e-3}
    return argparse.Namespace(**{**given, **changes})


def test_places_and_pictures_are_the_same_each_time() -> None:
    places = block.draw(3, 5)
    assert np.array_equal(places, block.draw(3, 5))
    assert np.array_equal(block.render(places), block.render(places))


def test_the_picture_shows_the_block_at_its_place() -> None:
    places = np.array([[0.1, 0.1], [-0.1, 0.05]])
    for place, picture in zip(places, block.render(places), strict=True):
        orange = np.argwhere(picture[..., 0] > 200)
        row, column = orange.mean(axis=0)
        x, y = (column + 0.5) / block.SIDE * 0.4 - 0.2, 0.2 - (row + 0.5) / block.SIDE * 0.4
        assert np.abs([x, y] - place).max() < 0.01


def test_a_block_stays_within_reach_and_moves_no_faster_than_it_can() -> None:
    place = block.moved(np.array([0.14, 0.0]), np.array([0.05, 1.0]))
    assert np.allclose(place, [0.15, 0.05])


def test_the_judge_gives_full_marks_to_a_straight_way_and_none_to_a_still_block() -> None:
    def straight(place: np.ndarray, goal: np.ndarray) -> tuple[np.ndarray, float]:
        return (goal - place)[None], float(np.abs(goal - place).sum())

    verdict = judge_block.judge(straight, 10)
    assert (verdict["reached"], verdict["energy_fell"]) == (1.0, 1.0)
    still = judge_block.judge(lambda place, goal: (np.zeros((1, 2)), 1.0), 10)
    assert (still["reached"], still["energy_fell"]) == (0.0, 0.0)


def test_targets_are_farther_apart_the_farther_the_block_is(tmp_path: Path) -> None:
    """Energies must fall towards the goal from every place."""
    targets = train_block.Targets(train_block.write_config(tmp_path), 7, torch.device("cpu"))
    line = np.stack([np.linspace(-0.15, 0.15, 13), np.zeros(13)], axis=-1)
    vectors = targets(line)
    far = (vectors - vectors[0]).abs().mean(dim=(1, 2))
    assert (far.diff() > 0).all()


def test_training_writes_a_checkpoint_that_the_plugin_reads(tmp_path: Path) -> None:
    with torch.inference_mode(False):
        log = train_block.train(tmp_path, options())
    assert log["parameters"] < 1_500_000 and log["predictor"]["steps"] == STEPS
    assert (tmp_path / "model.safetensors").stat().st_size < 3_000_000
    config = train_block.write_config(tmp_path)
    encoder, predictor = Encoder(config.encoder), ActionPredictor(config)
    source = Source.find(tmp_path)
    fill(encoder, source, names.ENCODER, AC_RULES, None)
    fill(predictor, source, names.ACTION, AC_RULES, None)
    frames = train_block.pixels(block.draw(1, 2), torch.device("cpu"))
    assert torch.isfinite(train_block.encode(encoder, frames)).all()


def test_a_taught_and_an_own_rollout_agree_on_the_first_frame_and_then_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = train_block.write_config(tmp_path)
    predictor = ActionPredictor(config)
    latents = torch.randn(2, 3, config.encoder.frame_tokens, config.encoder.vit.width)
    poses = torch.zeros(2, 3, block.POSE)
    with torch.no_grad():
        taught, own = (
            train_block.rolled(predictor, latents, poses, poses, is_taught=is_taught) for is_taught in (True, False)
        )
    assert torch.allclose(taught[:, 0], own[:, 0], atol=1e-6)
    assert not torch.allclose(taught[:, 1], own[:, 1], atol=1e-3)
