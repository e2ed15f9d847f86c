"""Videos whose loop extrapolates velocities in place of forward passes: their steps, passes and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import judge_moves
import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.conformance.nodes import build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.errors import ConfigError
from mstar_core.families.step_cache import MOST_CACHED, step_groups
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.loader import find_entry, load_plugin
from mstar_core.plugin.processor import PromptRequest
from mstar_core.plugin.surface import PROGRESS
from mstar_wan22 import moves
from mstar_wan22.nodes.solver import HISTORY, advance
from mstar_wan22.params import Params
from mstar_wan22.plugin import mstar_models
from mstar_wan22.processor import Processor
from mstar_wan22.request.schedule import Column, folded, step_table
from mstar_wan22.sources.mini import FOLDER

STEPS = 24
SHARE = 0.5
VIDEOS = 3
NOISE_PASSES = 1
"""Passes of the solver that make the first noise."""


def field(x: Tensor, level: float) -> Tensor:
    return torch.tanh(x) * (1 - 0.5 * level) - 0.3


@pytest.mark.parametrize("solver", ["unipc", "euler"])
@pytest.mark.parametrize("share", [0.2, SHARE, MOST_CACHED])
def test_folded_steps_equal_steps_that_extrapolate_one_by_one(solver: str, share: float) -> None:
    table, _ = step_table(STEPS, 5.0, (1, 1), None, "diffusers", solver)
    start = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    levels = [float(level) for level in table[:, Column.SIGMA]]

    expected, history, before = start, start.new_zeros(HISTORY, *start.shape), torch.zeros_like(start)
    for group in step_groups(levels, share):
        velocity = field(expected, levels[group.first])
        for weight, row in zip(group.weights, table[group.first : group.stop], strict=True):
            expected, history = advance(expected, history, velocity + weight * (velocity - before), row)
        before = velocity

    rows = folded(table, share)
    x, kept = start, start.new_zeros(HISTORY, *start.shape)
    for group, row in zip(step_groups(levels, share), rows, strict=True):
        x, kept = advance(x, kept, field(x, levels[group.first]), row)
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept[:HISTORY], history, atol=1e-5, rtol=1e-5)
    assert rows[:, Column.NUMBER].tolist() == [group.stop - 1 for group in step_groups(levels, share)]
    assert set(rows[:, Column.TIME]) <= set(table[:, Column.TIME])


# -- the runtime -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["wan22", "wan22_a14b"])
def small(request: pytest.FixtureRequest) -> Miniature:
    models = load_plugin("wan22")
    spec = next(spec for spec in models if spec.name == request.param)
    return miniature(Subject(entry=find_entry("wan22"), models=models, spec=spec))


def ask_for(small: Miniature, name: str = "text to video", **params: Any) -> SampleRequest:
    ask = next(ask for ask in small.asks if ask.name == f"sample {name!r}")
    own = {**ask.params, "num_inference_steps": STEPS, **params}
    return replace(ask, params=own, outputs=(*ask.outputs, PROGRESS))


def served(small: Miniature, *asks: SampleRequest) -> tuple[Sequence[RequestOutcome], Counter[str]]:
    """Return the answers of requests sent together, and the passes of each node."""
    passes = Counter[str]()
    runtime = small.runtime(faults=lambda node, handles: passes.update({node: len(handles)}))
    outcomes = runtime.ask(*asks)
    assert [outcome.status for outcome in outcomes] == ["finished"] * len(asks), [each.cause for each in outcomes]
    assert runtime.leaks() == []
    return outcomes, passes


def frames(outcome: RequestOutcome) -> np.ndarray:
    return np.concatenate([np.asarray(item.array) for item in outcome.items if item.modality == "video"])


def transformers(passes: Counter[str]) -> int:
    return passes["transformer"] + passes["transformer_2"]


def test_half_of_the_steps_run_half_of_the_passes(small: Miniature) -> None:
    (full,), every = served(small, ask_for(small))
    (half,), some = served(small, ask_for(small, step_cache=SHARE))
    assert transformers(every) == every["solver"] - NOISE_PASSES == STEPS
    assert transformers(some) == some["solver"] - NOISE_PASSES
    assert abs(transformers(some) - STEPS / 2) <= 2, "experts round by themselves"
    told = [int(item.array[0]) for item in half.items if item.modality == PROGRESS]
    assert len(told) == transformers(some) and told == sorted(set(told)) and told[-1] == STEPS
    assert not np.array_equal(frames(half), frames(full))


def test_videos_with_and_without_it_run_beside_each_other(small: Miniature) -> None:
    asks = [ask_for(small), ask_for(small, step_cache=0.0), ask_for(small, step_cache=SHARE)]
    alone = [served(small, ask) for ask in asks]
    together, passes = served(small, *asks)
    assert passes == sum((each for _, each in alone), Counter[str]())
    for (outcomes, _), outcome in zip(alone, together, strict=True):
        assert np.array_equal(frames(outcomes[0]), frames(outcome))
    assert np.array_equal(frames(together[0]), frames(together[1])), "zero is off"


def test_previews_come_between_groups(small: Miniature) -> None:
    (plain,), _ = served(small, ask_for(small, step_cache=SHARE))
    ask = ask_for(small, "previews", step_cache=SHARE, flow_shift=None)
    (shown,), _ = served(small, replace(ask, text=ask_for(small).text))
    assert np.array_equal(frames(shown), frames(plain))
    assert sum(item.modality == "partial_image" for item in shown.items) == 3


# -- the option and the count ------------------------------------------------------------------------------------------


def test_the_deployment_sets_the_share_of_requests_without_one() -> None:
    def computed(processor: Processor, **params: Any) -> int | None:
        own = Params(**{**moves.PARAMS, "num_inference_steps": STEPS, **params})
        prompt = PromptRequest(text="a circle", params=own, outputs=frozenset({"video"}), max_seq_len=4096)
        return processor.process_prompt(prompt).usage.get("computed_steps")

    default, own = (Processor(FOLDER, kwargs) for kwargs in ({}, {"step_cache": SHARE}))
    assert computed(default) is None and computed(default, step_cache=SHARE) == STEPS / 2
    assert computed(own) == STEPS / 2 and computed(own, step_cache=0.0) is None


@pytest.mark.parametrize("value", [0.9, True, "much"])
def test_an_option_out_of_its_range_is_refused(value: Any) -> None:
    spec = mstar_models()[0]
    assert spec.bound(None, {"step_cache": SHARE}).model_kwargs["step_cache"] == SHARE
    with pytest.raises(ConfigError, match="step_cache"):
        spec.bound(None, {"step_cache": value})


# -- the trained miniature ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The trained miniature in the runtime. latents: what its decoder got, in order."""

    runtime: LocalRuntime
    latents: list[Tensor]

    def made(self, move: moves.Move, seed: int, **params: Any) -> Tensor:
        """Return the latents of a move's video."""
        own = {**moves.PARAMS, **params}
        ask = SampleRequest(text=move.sentence, params=own, outputs=("video",), seed=seed)
        self.latents.clear()
        (outcome,) = self.runtime.ask(ask)
        assert outcome.status == "finished", outcome.cause
        return self.latents[0]


@contextmanager
def trained() -> Iterator[Trained]:
    spec = mstar_models()[0].bound(FOLDER, {})
    built, seen = build_nodes(spec, FOLDER), list[Tensor]()

    def see(module: Any, args: Any, ports: dict[str, Any]) -> None:
        seen.extend(x.clone() for x in ports["latents"])

    handle = built["vae_decoder"].module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield Trained(LocalRuntime(spec, FOLDER, built=built, processor=Processor(FOLDER, {})), seen)
    finally:
        handle.remove()


def test_half_of_the_passes_come_nearer_than_fewer_steps_do() -> None:
    errors: dict[str, list[float]] = {"cached": [], "fewer": []}
    whole = 2 * STEPS
    settings: dict[str, dict[str, Any]] = {
        "cached": {"num_inference_steps": whole, "step_cache": SHARE},
        "fewer": {"num_inference_steps": STEPS},
    }
    with trained() as mini:
        for number, (move, _) in enumerate(judge_moves.chosen(VIDEOS)):
            full = mini.made(move, number, num_inference_steps=whole)
            for name, params in settings.items():
                x = mini.made(move, number, **params)
                errors[name].append(float((x - full).norm() / full.norm()))
    assert 0 < np.mean(errors["cached"]) < 0.8 * np.mean(errors["fewer"]), errors
