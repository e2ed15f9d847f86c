"""Noise grids and the solver against the reference."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mstar_wan22.nodes.solver import HISTORY, advance
from mstar_wan22.request.schedule import Column, euler_sigmas, sigmas, step_table, timesteps

from .conftest import GOLDEN, close

SCHEDULES = GOLDEN.json("schedules.json")
TENSORS = GOLDEN.tensors("scheduler")
TRAJECTORIES = sorted({name.partition(".")[0] for name in TENSORS})


@pytest.mark.parametrize(("key", "grid"), [("unipc", "diffusers"), ("official_repo_unipc", "official")])
def test_grids(key: str, grid: str) -> None:
    for entry in SCHEDULES[key]:
        steps, shift = entry["steps"], entry["shift"]
        expected = np.array(entry["sigmas"], dtype=np.float32)
        np.testing.assert_allclose(sigmas(steps, shift, grid), expected, atol=2e-7, rtol=0)
        assert timesteps(steps, shift, grid).tolist() == [int(time) for time in entry["timesteps"]]


def test_euler_grids() -> None:
    for entry in SCHEDULES["euler"]:
        levels = euler_sigmas(entry["steps"], entry["shift"])
        np.testing.assert_allclose(levels, np.array(entry["sigmas"], dtype=np.float32), atol=2e-7, rtol=0)
        np.testing.assert_allclose(levels[:-1] * 1000, entry["timesteps"], atol=1e-3)


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_trajectories(name: str) -> None:
    match = re.fullmatch(r"(\w+)_s(\d+)_shift([\d.]+)", name)
    assert match is not None
    table, _ = step_table(int(match[2]), float(match[3]), (1, 1), None, "diffusers", "unipc")
    x, after = TENSORS[f"{name}.x0"], TENSORS[f"{name}.x_after"]
    history = x.new_zeros(HISTORY, *x.shape)
    for number, row in enumerate(table):
        given = TENSORS.get(f"{name}.v")
        field = torch.tanh(x) * (1 - 0.5 * float(row[Column.SIGMA])) - 0.3
        x, history = advance(x, history, field if given is None else given[number], row)
        close(x, after[number], 1e-5)


def test_euler_steps_are_those_of_the_flow() -> None:
    table, _ = step_table(3, 5.0, (1, 1), None, "diffusers", "euler")
    levels = euler_sigmas(3, 5.0)
    x = torch.ones(1)
    history = x.new_zeros(HISTORY, 1)
    for number, row in enumerate(table):
        expected = x + float(levels[number + 1] - levels[number]) * 2.0
        x, history = advance(x, history, torch.full((1,), 2.0), row)
        close(x, expected, 1e-6)
