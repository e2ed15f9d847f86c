"""Example call of `up` for each model."""

from __future__ import annotations

import pytest

from mstarctl.start.example import example_call
from tests.families.families import SPECS


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("orpheus", '--text "Hello there" --out hello.wav'),
        ("pi05", '--image picture.png --text "Hello there" --state state.json --out actions.json'),
        ("vjepa2", "--video clip.mp4 --out answer.safetensors"),
        ("vjepa2_ac", "--video clip.mp4 --out answer.safetensors"),
        ("bagel", '--text "Hello there"'),
    ],
)
def test_a_call_names_what_the_model_reads_and_gives(model: str, words: str) -> None:
    assert example_call(SPECS[model]) == words


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("orpheus", '--text "The red fox ran over the green hill today." --out hello.wav'),
        ("bagel", '--text "a red circle above a green square" --out picture.png'),
        ("pi05", '--image picture.png --text "reach the red target" --state state.json --out actions.json'),
        ("vjepa2_ac", "--video clip.mp4 --out answer.safetensors"),
    ],
)
def test_a_call_to_a_miniature_asks_for_what_it_was_trained_for(model: str, words: str) -> None:
    assert example_call(SPECS[model], "mini") == words
