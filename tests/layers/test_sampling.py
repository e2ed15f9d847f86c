"""Functional sampling: agrees with a plain reference and the engine's sampler, and draws the right distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.sampling import BAD_ROW, draw, sorted_draw

RULES = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.8), (0.9, 12, 0.6), (1.5, 1, 1.0), (1.0, 10**6, 0.05)]
"""Temperature, top-k, top-p."""


def columns(rules: list[tuple[float, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    heat, count, mass = zip(*rules, strict=True)
    return torch.tensor(heat), torch.tensor(count), torch.tensor(mass)


def probabilities(logits: np.ndarray, heat: float, count: int, mass: float) -> np.ndarray:
    """Return the distribution of one row by definition: temperature, top-k, top-p, normalization."""
    scaled = logits.astype(np.float64) / heat
    order = sorted(range(len(scaled)), key=lambda index: (-scaled[index], index))
    order = order[:count] if count else order
    shares = np.exp(scaled[order] - scaled.max())
    shares /= shares.sum()
    kept = 1 if mass < 1 else len(order)
    while kept < len(order) and shares[:kept].sum() < mass:
        kept += 1
    chances = np.zeros(len(scaled))
    chances[order[:kept]] = shares[:kept] / shares[:kept].sum()
    return chances


@pytest.mark.parametrize("rule", RULES)
def test_evenly_spaced_points_reproduce_the_distribution(rule: tuple[float, int, float]) -> None:
    generator = torch.Generator().manual_seed(7)
    logits, points = torch.randn(40, generator=generator) * 2, 4000
    uniform = (torch.arange(points) + 0.5) / points
    actual = draw(logits.expand(points, -1), uniform, *columns([rule] * points))
    shares = np.bincount(actual.numpy(), minlength=40) / points
    np.testing.assert_allclose(shares, probabilities(logits.numpy(), *rule), atol=1.5 / points)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_equal_those_of_the_engines_sampler(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rules = [*RULES, (0.0, 50, 0.8), (0.9, 50, 1.0), (1.0, 50, 0.8)] * 4
    logits = (torch.randn(len(rules), 1088, generator=generator) * 3).to(dtype)
    uniform = torch.rand(len(rules), generator=generator)
    params = [SamplingParams(temperature=heat, top_k=count, top_p=mass) for heat, count, mass in rules]
    columns_of = UploadedColumns.of(params, torch.device("cpu")).columns
    expected = sorted_draw(logits.float(), columns_of, uniform.double())
    assert draw(logits, uniform, *columns(rules)).tolist() == expected.tolist()


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits, uniform = torch.randn(len(RULES), 64, generator=generator), torch.rand(len(RULES), generator=generator)
    inputs = (logits, uniform, *columns(RULES))
    together = draw(*inputs)
    assert [int(draw(*(column[row : row + 1] for column in inputs))) for row in range(len(RULES))] == together.tolist()


def test_equal_logits_are_taken_in_order_of_id() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0])
    uniform = torch.tensor([0.1, 0.6, 0.999])
    assert draw(logits.expand(3, -1), uniform, *columns([(1.0, 2, 1.0)] * 3)).tolist() == [1, 2, 2]
    assert draw(logits[None], uniform[2:], *columns([(0.0, 0, 1.0)])).tolist() == [1]


def test_the_largest_uniform_stays_within_the_kept_ids() -> None:
    logits = torch.linspace(4, -4, 100)
    almost = torch.tensor([1 - 2.0**-24])
    for rule in RULES:
        kept = np.flatnonzero(probabilities(logits.numpy(), *rule))
        assert int(draw(logits[None], almost, *columns([rule]))) in kept


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_row_without_a_finite_maximum_is_marked(value: float, heat: float) -> None:
    logits = torch.zeros(2, 8)
    logits[0] = value
    drawn = draw(logits, torch.full((2,), 0.5), *columns([(heat, 3, 0.9)] * 2))
    assert drawn[0] == BAD_ROW and drawn[1] >= 0
