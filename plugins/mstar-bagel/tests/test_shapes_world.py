"""The world, judge and training of `bagel:mini`, without trained weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import train_shapes

from mstar_bagel import shapes
from mstar_bagel.checkpoint.config import MODEL_FILE, VAE_FILE, header_shapes, read_sizes
from mstar_bagel.published import names
from mstar_bagel.published import shapes as expected_shapes

SCENE = shapes.Scene(shapes.Thing("red", "circle"), "left of", shapes.Thing("blue", "square"))


def test_the_judge_recognises_every_drawn_scene() -> None:
    scenes = [*shapes.pairs(), *map(shapes.Scene, shapes.things())]
    chance = random.Random(1)
    assert all(shapes.shows(shapes.draw(scene, chance), scene) for scene in scenes)
    assert all(shapes.shows(shapes.draw(scene.mirrored, chance), scene) for scene in scenes[::7])


@pytest.mark.parametrize(
    "wrong",
    [
        shapes.Scene(SCENE.first),
        shapes.Scene(SCENE.first, "right of", SCENE.second),
        shapes.Scene(SCENE.first, "above", SCENE.second),
        shapes.Scene(shapes.Thing("green", "circle"), "left of", SCENE.second),
        shapes.Scene(shapes.Thing("red", "triangle"), "left of", SCENE.second),
    ],
    ids=lambda scene: scene.sentence,
)
def test_the_judge_refuses_a_wrong_picture(wrong: shapes.Scene) -> None:
    assert not shapes.shows(shapes.draw(wrong, random.Random(2)), SCENE)


def test_the_judge_refuses_noise_and_an_empty_picture() -> None:
    picture = shapes.draw(SCENE, random.Random(3))
    noise = torch.randint(256, picture.shape, generator=torch.Generator().manual_seed(1)).byte().numpy()
    assert not shapes.shows(noise, SCENE)
    assert not shapes.shows(picture * 0 + 235, SCENE)


def test_a_description_is_true_from_either_shape() -> None:
    assert shapes.describes("a red circle left of a blue square", SCENE)
    assert shapes.describes("a blue square right of a red circle", SCENE)
    assert not shapes.describes("a blue square left of a red circle", SCENE)


def test_no_unseen_combination_is_trained() -> None:
    seen, unseen, edits, other = shapes.split(20)
    assert not {each.sentence for each in seen} & {
        s for each in unseen for s in (each.sentence, each.mirrored.sentence)
    }
    assert unseen and other and not set(edits) & set(other)


def test_training_writes_the_official_layout(tmp_path: Path) -> None:
    options = train_shapes.parsed(
        [str(tmp_path), "--steps", "3", "--batch", "4", "--pictures", "16", "--seconds", "60", "60"]
    )
    with torch.inference_mode(False):  # the tests run without gradients
        log = train_shapes.train(tmp_path, options)
    sizes = read_sizes(tmp_path)
    actual = header_shapes(tmp_path / MODEL_FILE) | header_shapes(tmp_path / VAE_FILE)
    assert set(actual) == set(names(sizes))
    assert actual == expected_shapes(sizes)
    assert sizes.longest_side == shapes.SIDE
    assert log["parameters"] * 2 < 4_000_000
    assert set(log["model"]["last"]) == {"step", "draw", "describe", "edit"}


def test_batched_passes_equal_the_nodes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = train_shapes.Miniature(train_shapes.write_configs(tmp_path))
    pictures = torch.randint(256, (2, 3, shapes.SIDE, shapes.SIDE), dtype=torch.uint8)
    alone = model.eyes(image=list(pictures))["features"]
    torch.testing.assert_close(model.features(pictures), torch.stack(alone), atol=1e-5, rtol=1e-5)
