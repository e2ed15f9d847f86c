"""Typical mistakes change the actions by far more than the tolerance, so the golden tests detect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from mstar_core.layers import linear
from mstar_pi05.nodes import flow, gemma

from .conftest import ITEMS

TOLERANCE = 2e-4
Patch = pytest.MonkeyPatch


def text_not_scaled(patch: Patch, run: Any) -> None:
    patch.setattr(run.policy.language, "scale", 1.0)


def text_scaled_twice(patch: Patch, run: Any) -> None:
    patch.setattr(run.policy.language, "scale", run.policy.language.scale**2)


def images_scaled_too(patch: Patch, run: Any) -> None:
    features, scale = run.features, run.policy.language.scale
    patch.setattr(run, "features", lambda *items: [feature * scale for feature in features(*items)])


def norm_without_the_one(patch: Patch, run: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    patch.setattr(gemma.GemmaNorm, "forward", forward)


def exact_gelu(patch: Patch, run: Any) -> None:
    patch.setattr(linear, "gelu", lambda x, approximate: gelu(x))


def scale_and_shift_swapped(patch: Patch, run: Any) -> None:
    true = flow.TimeTable.norm
    patch.setattr(flow.TimeTable, "norm", lambda self, number, rows: true(self, number, rows)[::-1])


def gates_ignored(patch: Patch, run: Any) -> None:
    true = flow.TimeTable.gate
    patch.setattr(flow.TimeTable, "gate", lambda self, number, rows: torch.ones_like(true(self, number, rows)))


def gates_of_the_norm_behind(patch: Patch, run: Any) -> None:
    true = flow.TimeTable.gate
    patch.setattr(flow.TimeTable, "gate", lambda self, number, rows: true(self, number + 1, rows))


def causal_prefix(patch: Patch, run: Any) -> None:
    prefill = run.prefill
    patch.setattr(run, "prefill", lambda *items: prefill(*items, causal=True))


def positions_from_zero(patch: Patch, run: Any) -> None:
    step = run.step
    patch.setattr(run, "step", lambda rows, steps: step(rows, steps, start=0))


def positions_that_count_padding(patch: Patch, run: Any) -> None:
    step, padded = run.step, int(run.golden.valid(0).numel())
    patch.setattr(run, "step", lambda rows, steps: step(rows, steps, start=padded))


def the_suffix_stays_in_the_cache(patch: Patch, run: Any) -> None:
    plan = run.cache.plan
    patch.setattr(run.cache, "plan", lambda *segments, writes=True, causal=False: plan(*segments, causal=causal))


def time_from_zero(patch: Patch, run: Any) -> None:
    _timed(patch, run, 1.0 - flow_times(run))


def the_last_time_is_zero(patch: Patch, run: Any) -> None:
    count = run.golden.steps
    _timed(patch, run, torch.linspace(1.0, 0.0, count))


def cosines_first(patch: Patch, run: Any) -> None:
    true = flow.embedded
    patch.setattr(flow, "embedded", lambda *given: torch.cat(true(*given).chunk(2, dim=-1)[::-1], dim=-1))
    _timed(patch, run, flow_times(run))


def embedding_of_usual_frequencies(patch: Patch, run: Any) -> None:
    def embedded(times: torch.Tensor, width: int, *periods: float) -> torch.Tensor:
        angle = times.double()[:, None] / 10000.0 ** (torch.arange(width // 2) / (width // 2))
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    patch.setattr(flow, "embedded", embedded)
    _timed(patch, run, flow_times(run))


def no_silu_at_the_end_of_the_time(patch: Patch, run: Any) -> None:
    calls: list[int] = []

    def silu(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x if len(calls) % 2 == 0 else torch.nn.functional.silu(x)

    patch.setattr(flow, "silu", silu)
    _timed(patch, run, flow_times(run))


def flow_times(run: Any) -> torch.Tensor:
    return torch.tensor(flow.flow_times(run.golden.steps))


def _timed(patch: Patch, run: Any, times: torch.Tensor) -> None:
    """Use a table of other times, made while the mistake is active."""
    count, policy = len(times), run.built.policy
    rows = torch.zeros(count + 1, count, dtype=torch.int64)
    rows[count] = torch.arange(count)
    policy.tabulate(times, rows)
    patch.setattr(run, "policy", policy)


MISTAKES = [
    text_not_scaled,
    text_scaled_twice,
    images_scaled_too,
    norm_without_the_one,
    exact_gelu,
    scale_and_shift_swapped,
    gates_of_the_norm_behind,
    gates_ignored,
    causal_prefix,
    positions_from_zero,
    positions_that_count_padding,
    the_suffix_stays_in_the_cache,
    time_from_zero,
    the_last_time_is_zero,
    cosines_first,
    embedding_of_usual_frequencies,
    no_silu_at_the_end_of_the_time,
]


@pytest.fixture
def patch() -> Iterator[Patch]:
    with pytest.MonkeyPatch.context() as found:
        yield found


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_a_mistake_is_seen(mistake: Callable[[Patch, Any], None], golden: Any, run: Any, patch: Patch) -> None:
    mistake(patch, run)
    run.prefill(*ITEMS)
    apart = (torch.stack(run.flow(*ITEMS)) - golden.expected["actions"]).abs().max()
    assert apart > TOLERANCE


def test_without_a_mistake_the_same_path_passes(golden: Any, run: Any, patch: Patch) -> None:
    _timed(patch, run, flow_times(run))
    run.prefill(*ITEMS)
    assert (torch.stack(run.flow(*ITEMS)) - golden.expected["actions"]).abs().max() <= TOLERANCE
