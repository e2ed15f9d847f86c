"""Example call of `up` for each model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstarctl.start.example import example_call
from tests.families.families import SPECS


@pytest.mark.parametrize(
    ("model", "source", "words"),
    [
        ("orpheus", "official", '--text "Hello there, how are you today?" --out hello.wav'),
        ("orpheus", "mini", '--text "The red fox ran over the green hill today." --out hello.wav'),
        ("bagel", "official", '--text "A small red boat on a calm lake, morning light" --out picture.png'),
        ("bagel", "mini", '--text "a red circle above a green square" --out picture.png'),
        ("bagel", "tiny", "--sample --out picture.png"),
        ("pi05", "official", "--sample --out actions.json"),
        ("pi05", "mini", "--sample --out actions.json"),
        ("vjepa2", "official", "--sample --out encode.safetensors"),
        ("vjepa2_ac", "mini", "--sample --out plan.safetensors"),
        ("qwen3_omni", "mini", "--sample"),
        ("llm", "official", "--sample"),
        ("llm", "mini", '--text "What is the capital of France?"'),
    ],
)
def test_a_text_is_written_out_and_files_come_from_the_sample(model: str, source: str, words: str) -> None:
    assert example_call(SPECS[model], source) == words


def test_a_plugin_that_fails_to_make_samples_gives_no_example() -> None:
    assert example_call(replace(SPECS["orpheus"], make_samples="tests.families.test_samples:broken")) == ""
