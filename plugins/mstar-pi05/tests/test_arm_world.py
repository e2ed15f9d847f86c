"""The world, data, training and judge of `pi05:mini`, without its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import judge_arm
import numpy as np
import pytest
import torch
import train_arm

from mstar_pi05 import arm
from mstar_pi05.checkpoint.config import IMAGE
from mstar_pi05.request.prompt import PromptTokenizer, pieces

from .conftest import PackedCache, with_times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mini") / "pi05"
    train_arm.write_files(made)
    return made


def test_scenes_and_pictures_are_the_same_each_time() -> None:
    first, second, other = arm.draw(3, 4), arm.draw(3, 4), arm.draw(4, 4)
    assert np.array_equal(first.joints, second.joints) and np.array_equal(first.targets, second.targets)
    assert not np.array_equal(first.joints, other.joints)
    assert np.array_equal(arm.render(first), arm.render(second))


def test_inverse_kinematics_invert_the_arm() -> None:
    joints = np.random.default_rng(0).uniform(arm.LOW, arm.HIGH, (50, 2))
    assert np.abs(arm.solution(arm.points(joints)[1]) - joints).max() < 1e-9


def test_the_camera_above_shows_each_target_at_its_place() -> None:
    scenes = arm.draw(5, 20)
    pictures = arm.render(scenes)
    assert pictures.shape == (20, 3, arm.SIDE, arm.SIDE, 3) and pictures.dtype == np.uint8
    shown = 0
    for scene, picture in enumerate(pictures[:, 0]):
        for number, colour in enumerate(arm.COLOURS.values()):
            x, y = (scenes.targets[scene, number] / 1.1 * (1, -1) + 1) / 2 * arm.SIDE
            shown += int(np.abs(picture[int(y), int(x)].astype(int) - colour).max() < 60)
    assert shown >= 50  # the arm hides a few of the 60


def test_the_judge_gives_full_marks_to_the_expert_and_none_to_a_still_arm() -> None:
    assert judge_arm.judge(lambda scene: arm.expert(scene)[0], 20)["reached"] == 1.0
    assert judge_arm.judge(lambda scene: np.zeros((arm.HORIZON, 2)), 20)["reached"] == 0.0


def test_the_judge_gives_no_marks_for_another_target() -> None:
    def confused(scene: arm.Scenes) -> Any:
        return arm.expert(arm.Scenes(scene.joints, scene.targets, (scene.named + 1) % 3))[0]

    assert judge_arm.judge(confused, 20)["reached"] == 0.0


def test_prompts_of_every_target_and_state_have_one_length(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    lengths = {
        len(tokenizer.encode(pieces(arm.instruction(named), np.array(state))))
        for named in range(3)
        for state in ([-1.0, 0.99], [0.0, 0.5], [-0.7, -0.2])
    }
    assert lengths == {18}


def test_a_step_of_training_lowers_the_loss_and_its_checkpoint_is_read_back(folder: Path, models: Any) -> None:
    with torch.inference_mode(False):
        torch.manual_seed(0)
        batch = tuple(torch.from_numpy(part[:8]) for part in train_arm.made(folder, 0, 0))
        model = train_arm.Miniature(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for _ in range(6):
            loss = torch.stack(model.loss(batch, torch.Generator().manual_seed(1))).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]
        train_arm.save(model, folder)
    read = models(folder)
    for place, actual in ((model.cameras, read.cameras()), (model.policy, read.policy())):
        held = place.state_dict()
        for name, value in actual.state_dict().items():
            assert torch.equal(value, held[name].to(torch.bfloat16).to(value.dtype)), name


def test_training_sees_what_a_deployment_sees(folder: Path) -> None:
    """The velocity over the training's batched cache equals that over one sequence's cache."""
    torch.manual_seed(0)
    model = train_arm.Miniature(folder).eval()
    images, prompts, *_ = (torch.from_numpy(part[:2]) for part in train_arm.made(folder, 0, 0))
    with_times(model.policy, torch.tensor([0.5]))
    noise = torch.randn(2, arm.HORIZON, 32)
    actual = []
    for rows in ([0, 1], [0], [1]):
        vectors = model.cameras.encode(images[rows])
        count, length = vectors.shape[1], vectors.shape[1] + prompts.shape[1]
        tokens = torch.cat([prompts.new_full((len(rows), count), IMAGE), prompts[rows]], dim=1).flatten()
        embeds = torch.nn.functional.pad(vectors, (0, 0, 0, length - count)).flatten(0, 1)
        batched = train_arm.TrainingCache(len(rows)) if len(rows) > 1 else None
        packed = PackedCache(1)
        cache = batched or packed.plan((0, length))
        model.policy(kv=cache, positions=torch.arange(length).repeat(len(rows)), tokens=tokens, embeds=embeds)
        if batched:
            batched.draws = 1
        else:
            packed.plan((0, arm.HORIZON), writes=False)
        places = (length + torch.arange(arm.HORIZON)).repeat(len(rows))
        which = torch.zeros(len(places), dtype=torch.int64)
        actual.append(model.policy.velocity(cache, places, noise[rows].flatten(0, 1), which))
    torch.testing.assert_close(actual[0], torch.cat(actual[1:]), atol=1e-5, rtol=0)


def test_training_writes_a_whole_checkpoint_with_its_log(tmp_path: Path) -> None:
    with torch.inference_mode(False):
        options = argparse.Namespace(
            device="cpu", seed=1, minutes=1.0, steps=2, batch=8, rate=1e-3, samples=train_arm.CHUNK, workers=1
        )
        log = train_arm.train(tmp_path / "mini", options)
    assert log["steps"] == 2 and log["parameters"] < 1_000_000
    size = (tmp_path / "mini" / "model.safetensors").stat().st_size
    assert size < 3_000_000
    assert {path.name for path in (tmp_path / "mini").iterdir()} == {
        "assets",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "train.json",
    }
