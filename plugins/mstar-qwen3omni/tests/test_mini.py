"""The trained miniature `qwen3_omni:mini`: right answers in text and speech over HTTP, and a broken part is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.layers import Checkpoint
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.checkpoint.shipped import FOLDER
from mstar_qwen3omni.checkpoint.weights import TENSORS, load, own_tensors
from tests.runtime.deployment import Deployment

from .mini_parts import SOUNDS, train
from .test_golden_http import OMNI

judge, prompts, sounds = train("judge"), train("prompts"), train("sounds")
QUESTIONS = 40
SPOKEN = 6
VOICE = "ethan"
"""The voice whose answers `mini_sounds.npz` holds."""
LEAST = 0.9
"""Share of few questions that an intact miniature answers right, and a broken one does not."""

Patch = pytest.MonkeyPatch


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        Deployment(served=OMNI, name="mini", weights_source="mini") as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ask(client: httpx.Client) -> Any:
    return judge.served(client, "qwen3_omni")


def test_questions_about_pictures_clips_and_sounds_are_answered(ask: Any) -> None:
    verdict = judge.judge_text(ask, sounds.load(SOUNDS), QUESTIONS, workers=2)
    assert set(verdict) == {"text", "image", "video", "audio"}
    assert verdict["text"] >= LEAST, verdict


def test_spoken_answers_are_heard_right(ask: Any) -> None:
    tensors = sounds.load(SOUNDS)
    listeners = {"nearest": lambda voice: judge.nearest(tensors.answers, voice)} | (
        {"recognizer": lambda voice: judge.recognizer()}
    )
    verdict = judge.judge_speech(ask, tensors, SPOKEN, listeners)
    assert verdict["nearest"] >= LEAST, verdict
    assert verdict["recognizer"] >= 0.6, verdict


def test_a_text_is_read_aloud_word_for_word(client: httpx.Client) -> None:
    """The Talker speaks a text that the Thinker was held to, as it speaks answers."""
    answers = sounds.load(SOUNDS).answers
    listen = judge.nearest(answers, VOICE)
    words = sorted(word for voice, word in answers if voice == VOICE)[:SPOKEN]
    heard = []
    for word in words:
        body = {"input": word, "verbatim": True, "voice": VOICE, "response_format": "pcm", "seed": 1}
        spoken = client.post("/v1/audio/speech", json=body).raise_for_status()
        heard.append(listen(np.frombuffer(spoken.content, "<i2") / np.float32(32768)))
    assert np.mean([word == other for word, other in zip(words, heard, strict=True)]) >= LEAST, (words, heard)


def test_speech_whose_chunks_are_swapped_is_noticed(ask: Any) -> None:
    tensors = sounds.load(SOUNDS)

    def swapped(*given: Any) -> Any:
        reply = ask(*given)
        sound = reply.sound
        return judge.Reply(text=reply.text, sound=None if sound is None else np.roll(sound, len(sound) // 2))

    verdict = judge.judge_speech(
        swapped, tensors, SPOKEN, {"nearest": lambda voice: judge.nearest(tensors.answers, voice)}
    )
    assert verdict["nearest"] < LEAST, verdict


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Any:
    config, files = read_config(FOLDER), Checkpoint.find(FOLDER)
    made = train("nodes").Nodes(config)
    for name in TENSORS:
        load(made[name], own_tensors(files, name), name, None)
    return made.eval()


def right(nodes: Any) -> float:
    """Return the share of questions that are answered right, of the kind with the lowest."""
    given = prompts.Prompts(nodes.config, FOLDER, sounds.load(SOUNDS))
    found: dict[str, float] = train("thinker").judged(nodes, given, torch.device("cpu"), 64)
    return min(found.values())


def test_questions_are_answered_in_one_process(nodes: Any) -> None:
    assert right(nodes) >= LEAST


def masks_of_eight_tokens(patch: Patch) -> None:
    def attend(self: Any, layer: int, query: Any, key: Any, value: Any, scale: float | None = None) -> torch.Tensor:
        wide = [each.unflatten(0, (self._rows, -1)).transpose(1, 2) for each in (query, key, value)]
        near = torch.ones(wide[0].shape[2], wide[1].shape[2], dtype=torch.bool).tril().triu(-8)
        return scaled_dot_product_attention(*wide, near, scale=scale, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    patch.setattr(train("nodes").DenseView, "attend", attend)


def positions_that_stand_still(patch: Patch) -> None:
    true = prompts.Prompts.batch

    def batch(self: Any, *given: Any) -> Any:
        made = true(self, *given)
        made.positions.zero_()
        return made

    patch.setattr(prompts.Prompts, "batch", batch)


def sound_that_is_not_normalised(patch: Patch) -> None:
    true = prompts.LogMel.__call__
    patch.setattr(prompts.LogMel, "__call__", lambda self, given: [each * 4 - 4 for each in true(self, given)])


def pictures_with_swapped_colours(patch: Patch) -> None:
    true = prompts.patches_of
    patch.setattr(prompts, "patches_of", lambda frames, *given: true([frame[..., ::-1] for frame in frames], *given))


@pytest.mark.parametrize(
    "broken",
    [masks_of_eight_tokens, positions_that_stand_still, sound_that_is_not_normalised, pictures_with_swapped_colours],
)
def test_a_broken_part_is_noticed(broken: Callable[[Patch], None], nodes: Any, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert right(nodes) < LEAST
