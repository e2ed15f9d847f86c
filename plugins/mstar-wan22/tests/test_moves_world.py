"""The world and judge of `wan22:mini`, without trained weights."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from mstar_wan22 import moves

MOVE = moves.Move("red", "circle", "right")


def test_the_judge_recognises_every_drawn_move() -> None:
    chance = random.Random(1)
    found = [moves.shows(moves.film(move, chance), move) for move in moves.moves() for _ in range(3)]
    assert all(found)


@pytest.mark.parametrize("change", [{"color": "blue"}, {"shape": "square"}, {"direction": "left"}, {"direction": "up"}])
def test_the_judge_refuses_another_video(change: dict[str, str]) -> None:
    video = moves.film(MOVE, random.Random(2))
    assert moves.shows(video, MOVE)
    assert not moves.shows(video, replace(MOVE, **change))


def test_the_judge_refuses_noise_and_a_shape_that_stays() -> None:
    video = moves.film(MOVE, random.Random(3))
    noise = np.random.default_rng(1).integers(256, size=video.shape, dtype=np.uint8)
    assert not moves.shows(noise, MOVE)
    assert not moves.shows(video[:1].repeat(moves.FRAMES, 0), MOVE)


def test_no_unseen_move_is_trained() -> None:
    seen, unseen = moves.split(22)
    assert unseen and not set(seen) & set(unseen) and len(seen) + len(unseen) == len(moves.moves())
