"""The trained miniature `vjepa2_ac:mini`: it plans to goal pictures over HTTP, and a broken part is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import judge_block
import numpy as np
import pytest
import torch
import train_block

from mstar_core.client import MStarClient
from mstar_vjepa2 import block
from mstar_vjepa2.checkpoint import names
from mstar_vjepa2.checkpoint.config import read_action
from mstar_vjepa2.checkpoint.loading import Source, fill
from mstar_vjepa2.mini import FOLDER
from mstar_vjepa2.model import AC_RULES
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import Encoder
from mstar_vjepa2.nodes.rotary import Rotary3D
from tests.runtime.deployment import Deployment

from .server import AC

EPISODES = 5
WORST = 0.2
"""Largest relative error of predicted frames: the mean distance to the true ones over that to the unmoved ones."""

Parts = tuple[Encoder, ActionPredictor]


@pytest.fixture(scope="module")
def client() -> Iterator[MStarClient]:
    with Deployment(served=AC, name="mini", weights_source="mini") as running, MStarClient(running.url) as client:
        yield client


@pytest.fixture
def parts() -> Parts:
    config = read_action(FOLDER)
    encoder, predictor, source = Encoder(config.encoder), ActionPredictor(config), Source.find(FOLDER)
    fill(encoder, source, names.ENCODER, AC_RULES, None)
    fill(predictor, source, names.ACTION, AC_RULES, None)
    return encoder.eval(), predictor.eval()


def test_plans_move_the_block_to_the_goal_and_energies_fall(client: MStarClient) -> None:
    verdict = judge_block.judge(judge_block.served(client), EPISODES, workers=2)
    assert verdict["reached"] >= 0.9, verdict
    assert verdict["energy_fell"] >= 0.9, verdict
    assert verdict["last_energy"] < 0.5 * verdict["first_energy"], verdict


def error(parts: Parts, **changed: Any) -> float:
    """Return the relative error of a rollout of two steps. changed: other values of its arguments."""
    encoder, predictor = parts
    places, moves = train_block.sequences(np.random.default_rng(99), 32)
    flat = train_block.encode(encoder, train_block.pixels(places.reshape(-1, 2), torch.device("cpu")))
    latents = flat.unflatten(0, places.shape[:2])
    actions, states = (torch.from_numpy(block.poses(each)).float() for each in (moves, places[:, :-1]))
    given = {"given": latents[:, :2], "actions": actions[:, :2], "states": states[:, :2], **changed}
    made = train_block.rolled(predictor, **given, is_taught=False)
    apart = (latents[:, 2] - latents[:, 0]).abs().mean()
    return float((made[:, 1] - latents[:, 2]).abs().mean() / apart)


def test_the_predictor_foresees_the_block(parts: Parts) -> None:
    assert error(parts) < WORST


def test_a_broken_mask_is_noticed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a frame attend only to earlier tokens of it."""
    true = train_block.scaled_dot_product_attention
    monkeypatch.setattr(
        train_block, "scaled_dot_product_attention", lambda q, k, v, scale=None: true(q, k[:, :, :9], v[:, :, :9])
    )
    assert error(parts) > WORST


def test_broken_positions_of_the_predictor_are_noticed(parts: Parts) -> None:
    parts[1].row, parts[1].column = torch.zeros_like(parts[1].row), torch.zeros_like(parts[1].column)
    assert error(parts) > WORST


def blur(encoder: Encoder) -> float:
    """Return the mean distance of the encoder's vectors, which have a variance of 1, to its training's targets."""
    places, seed = block.draw(5, 32), json.loads((FOLDER / "train.json").read_text())["seed"]
    targets = train_block.Targets(read_action(FOLDER), seed, torch.device("cpu"))(places)
    frames = train_block.pixels(places, torch.device("cpu"))
    return float((train_block.encode(encoder, frames) - targets).abs().mean())


def test_the_encoder_sees_the_block(parts: Parts) -> None:
    assert blur(parts[0]) < 0.1


def test_swapped_rows_and_columns_of_the_encoder_are_noticed(parts: Parts) -> None:
    rotary = parts[0].rotary
    rotary.forward = lambda time, row, column: Rotary3D.forward(rotary, time, column, row)  # type: ignore[method-assign]
    assert blur(parts[0]) > 0.1


def test_a_broken_normalisation_is_noticed(parts: Parts) -> None:
    parts[0].mean = torch.zeros_like(parts[0].mean)
    assert blur(parts[0]) > 0.1


def test_actions_that_are_left_out_are_noticed(parts: Parts) -> None:
    assert error(parts, actions=torch.zeros(32, 2, block.POSE)) > WORST
