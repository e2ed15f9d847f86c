"""World, training, export and judge of `qwen3_omni:mini`, without its weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.layers import Checkpoint
from mstar_qwen3omni import world
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.checkpoint.weights import TENSORS, load, own_tensors
from mstar_qwen3omni.model import new_module
from mstar_qwen3omni.published import shapes

from .mini_parts import SOUNDS, noise_sounds, train

judge, sounds = train("judge"), train("sounds")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, dict[str, float]]]]:
    """A folder with all stages after two steps each and its checkpoint, and the losses."""
    out = tmp_path_factory.mktemp("training")
    sounds.save(noise_sounds(), out / sounds.FILE)
    common = {
        "out": out,
        "device": "cpu",
        "seconds": 60.0,
        "steps": 2,
        "batch": 4,
        "rate": 1e-3,
        "report": 1,
        "seed": 1,
    }
    with torch.inference_mode(False), torch.enable_grad():
        found = {
            "thinker": train("thinker").train(argparse.Namespace(**common, judged=4, resume=False)),
            "codec": train("codec").train(argparse.Namespace(**common)),
            "talker": train("talker").train(argparse.Namespace(**common, pool=4)),
        }
        train("export").export(out / "checkpoint", out)
    yield out, found


# -- world -------------------------------------------------------------------------------------------------------------


def test_questions_depend_on_the_seed_alone() -> None:
    one, other = ([world.draw(np.random.default_rng(3)) for _ in range(2)] for _ in range(2))
    assert one == other


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_every_answer_is_one_of_the_closed_set(kind: str) -> None:
    chance = np.random.default_rng(4)
    assert {world.draw(chance, kind).answer for _ in range(50)} <= set(world.ANSWERS)


def test_a_picture_shows_each_shape_in_its_colour_at_its_place() -> None:
    chance = np.random.default_rng(5)
    for _ in range(20):
        question = world.draw(chance, "image")
        (frame,) = question.frames()
        for item in question.items:
            rows, columns = np.nonzero((frame == world.COLOURS[item.colour]).all(-1))
            near = 0.2 * item.size  # the centre of a triangle lies below the middle of its height
            assert abs(rows.mean() - item.y) < near and abs(columns.mean() - item.x) < near


def test_a_clip_moves_the_way_of_its_answer() -> None:
    chance = np.random.default_rng(6)
    for _ in range(20):
        question = world.draw(chance, "video")
        places = [np.argwhere(frame.max(-1) > world.BACKGROUND).mean(0) for frame in question.frames()]
        down, right = places[-1] - places[0]
        far = 0.9 * world.STEP * (world.FRAMES - 1)
        assert np.sign(np.round([right / far, down / far])).tolist() == list(world.WAYS[question.answer])


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_writes_a_checkpoint_that_every_node_reads(trained: Any) -> None:
    folder = trained[0] / "checkpoint"
    config = read_config(folder)
    files = Checkpoint.find(folder)
    assert set(files.file_of) == set(shapes(config))
    assert (folder / "model.safetensors").stat().st_size < 3_100_000
    for node in TENSORS:
        load(new_module(node, config), own_tensors(files, node), node, None)


def test_exported_weights_are_those_of_the_training(trained: Any) -> None:
    folder = trained[0] / "checkpoint"
    config = read_config(folder)
    module = new_module("Thinker", config)
    load(module, own_tensors(Checkpoint.find(folder), "Thinker"), "Thinker", None)
    nodes = train("nodes").Nodes(config)
    train("thinker").load(nodes, trained[0])
    for name, value in module.state_dict().items():
        assert torch.equal(value.bfloat16(), nodes.thinker.state_dict()[name].bfloat16()), name


def test_losses_of_all_stages_are_finite(trained: Any) -> None:
    assert all(np.isfinite(each["last"]) for each in trained[1].values())


def test_answers_are_one_token_each(trained: Any) -> None:
    folder = trained[0] / "mini"
    encode = train("prompts").Prompts(read_config(folder), folder, noise_sounds()).encode
    assert {len(encode(word)) for word in world.ANSWERS} == {1}


# -- judge -------------------------------------------------------------------------------------------------------------


def replies(text: Any, sound: Any) -> Any:
    """Return a deployment that answers with these functions of the true answer."""
    made = sounds.load(SOUNDS)

    def ask(question: Any, data: bytes, voice: str | None) -> Any:
        said = made.answers["ethan", sound(question.answer)] / np.float32(32768)
        return judge.Reply(text=text(question.answer), sound=None if voice is None else said)

    return ask


def another(word: str) -> str:
    return str(world.ANSWERS[world.ANSWERS.index(word) - 1])


def spoken(ask: Any) -> dict[str, float]:
    made = sounds.load(SOUNDS)
    listeners = {"nearest": lambda voice: judge.nearest(made.answers, voice)}
    found: dict[str, float] = judge.judge_speech(ask, made, 8, listeners)
    return found


def test_the_judge_gives_full_marks_to_true_answers() -> None:
    ask = replies(str, str)
    assert judge.judge_text(ask, sounds.load(SOUNDS), 16)["text"] == 1.0
    assert spoken(ask) == {"nearest": 1.0, "nearest_as_text": 1.0}


def test_the_judge_gives_nothing_to_wrong_answers() -> None:
    assert judge.judge_text(replies(another, str), sounds.load(SOUNDS), 16)["text"] == 0.0
    assert spoken(replies(str, another)) == {"nearest": 0.0, "nearest_as_text": 0.0}
    assert spoken(replies(another, another)) == {"nearest": 0.0, "nearest_as_text": 1.0}


def test_the_listener_tells_all_answers_apart_even_with_noise_and_hears_nothing_in_silence() -> None:
    tensors = sounds.load(SOUNDS)
    listen, chance = judge.nearest(tensors.answers, "ethan"), np.random.default_rng(1)
    for (_, word), pcm in tensors.answers.items():
        noisy = pcm / np.float32(32768) + chance.normal(0, 3e-3, len(pcm)).astype(np.float32)
        assert listen(noisy) == word
    assert listen(np.zeros(24_000, np.float32)) is None
