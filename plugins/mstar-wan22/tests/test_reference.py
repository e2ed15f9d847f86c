"""The reference of the gold checks against vectors of diffusers: noise levels, solver, text encoder and transformer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from mstar_wan22 import reference
from mstar_wan22.checkpoint.config import _text, _transformer

from .conftest import GOLDEN, close

TENSORS = GOLDEN.tensors("scheduler")
TRAJECTORIES = sorted({name.partition(".")[0] for name in TENSORS})


def test_noise_levels() -> None:
    for entry in GOLDEN.json("schedules.json")["unipc"]:
        levels, times = reference.noise_levels(entry["steps"], entry["shift"])
        close(torch.tensor(levels), torch.tensor(entry["sigmas"]), 2e-7)
        assert times == [int(time) for time in entry["timesteps"]]


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_trajectories(name: str) -> None:
    match = re.fullmatch(r"(\w+)_s(\d+)_shift([\d.]+)", name)
    assert match is not None
    levels, _ = reference.noise_levels(int(match[2]), float(match[3]))
    given = TENSORS.get(f"{name}.v")

    def velocity(x: Tensor, step: int) -> Tensor:
        return torch.tanh(x) * (1 - 0.5 * levels[step]) - 0.3 if given is None else given[step]

    close(reference.solved(TENSORS[f"{name}.x0"], levels, velocity), TENSORS[f"{name}.x_after"][-1], 1e-5)


def test_velocity() -> None:
    """Heads of the golden set have parts of unequal width for frame, row and column, unlike those of `:tiny`."""
    folder, vectors = GOLDEN.folder / GOLDEN.of_kind(expands=False), GOLDEN.tensors("transformer")
    ids = torch.tensor(GOLDEN.json("text.json")["prompts"]["clean"]["input_ids"])
    umt5, weights = reference._read(folder / "text_encoder"), reference._read(folder / "transformer")
    text = reference.text_vectors(umt5, _text(folder / "text_encoder/config.json"), ids)
    latents, times = vectors["a14b.in.hidden_states"], vectors["a14b.in.timestep"]
    for number, x in enumerate(latents):
        time = times[number].expand(x.shape[1])
        found = reference.transformer(weights, _transformer(folder / "transformer/config.json"), x, time, text)
        close(found, vectors["a14b.output"][number], 5e-5)
