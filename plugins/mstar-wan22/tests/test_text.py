"""Prompts and the text encoder against the reference."""

from __future__ import annotations

import pytest
import torch

from mstar_wan22.nodes.text import bucket
from mstar_wan22.request.tokenizer import LONGEST, PromptTokenizer, cleaned

from .conftest import GOLDEN, close

TEXTS = GOLDEN.json("text.json")
LIMIT = 5e-5


@pytest.mark.parametrize("name", TEXTS["prompts"])
def test_prompts_are_cleaned_and_tokenized(name: str) -> None:
    prompt = TEXTS["prompts"][name]
    assert cleaned(prompt["raw"]) == prompt["cleaned"]
    for checkpoint in GOLDEN.checkpoints:
        ids = PromptTokenizer(GOLDEN.part(checkpoint, "tokenizer")).ids(prompt["raw"])
        assert ids == prompt["input_ids"]
        assert len(ids) == prompt["n"] <= LONGEST == TEXTS["max_sequence_length"]


def test_buckets_of_all_distances() -> None:
    table = TEXTS["relative_position_bucket"]
    first, expected = table["first_distance"], table["buckets"]
    found = bucket(torch.arange(first, first + len(expected)), 32, 128)
    assert found.tolist() == expected


@pytest.mark.parametrize("name", TEXTS["prompts"])
def test_vectors_of_a_prompt(name: str) -> None:
    tensors = GOLDEN.tensors("text")
    values = GOLDEN.text_encoder(GOLDEN.of_kind(expands=True)).encoded(
        torch.tensor(TEXTS["prompts"][name]["input_ids"])
    )
    if f"{name}.embeds" in tensors:
        close(values[-1], tensors[f"{name}.embeds"], LIMIT)
    for key, rows in (("first16", slice(0, 16)), ("last16", slice(-16, None))):
        if (stored := tensors.get(f"{name}.embeds_{key}")) is not None:
            close(values[-1][rows], stored, LIMIT)
    for number, value in enumerate(values[:-1]):
        if (stored := tensors.get(f"{name}.after_block_{number}")) is not None:
            close(value, stored, LIMIT)
