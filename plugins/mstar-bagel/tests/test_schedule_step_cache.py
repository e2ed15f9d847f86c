"""Images whose loop extrapolates velocities in place of forward passes: their steps, passes, batches and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import judge_shapes
import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_bagel import shapes
from mstar_bagel.checkpoint.shipped import FOLDER
from mstar_bagel.nodes.flow import FlowSteps
from mstar_bagel.params import Params, guidance
from mstar_bagel.processor import Processor
from mstar_bagel.program import PHASES
from mstar_bagel.request.schedule import folded, phases, steps
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.conformance.nodes import build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.errors import ConfigError
from mstar_core.families.step_cache import MOST_CACHED, step_groups
from mstar_core.plugin import PARTIAL_IMAGE
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.loader import find_entry, load_plugin
from mstar_core.plugin.processor import PromptRequest
from mstar_core.plugin.surface import PROGRESS

from .conftest import SPEC

POINTS = 50
SHARE = 0.5
SCENES = 4
SHIFT = Params().timestep_shift
NOISE_PASSES = 1
"""Passes of the node of the steps that make the first noise."""


# -- steps -------------------------------------------------------------------------------------------------------------


def moved(table: np.ndarray, x: Tensor, field: Any) -> Tensor:
    """Return latents behind all steps of a table, through a velocity field of time and place."""
    combine, history = FlowSteps(x.shape[-1], torch.device("cpu")), torch.full_like(x, torch.nan)
    for number, row in enumerate(table):
        after = combine(
            latents=[x],
            history=[history],
            v=[field(float(row[0]), x)],
            guidance=[np.zeros(5, np.float32)],
            times=[table],
            step=np.array([number]),
            seeds=np.zeros(1),
        )
        x, history = after["latents"][0], after["history"][0]
    return x


def curved(time: float, x: Tensor) -> Tensor:
    return torch.tanh(x) * (1 - 0.5 * time) - 0.3


def test_plain_steps_read_no_history_and_are_those_of_euler() -> None:
    table, x = steps(POINTS, SHIFT), torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    expected = x
    for time, length, *_ in table:
        expected = expected - curved(float(time), expected) * float(length)
    assert torch.equal(moved(folded(table, 0.0), x, curved), expected)


@pytest.mark.parametrize("share", [0.2, SHARE, MOST_CACHED])
def test_folded_steps_equal_steps_that_extrapolate_one_by_one(share: float) -> None:
    table, x = steps(POINTS, SHIFT), torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    expected, before = x, torch.zeros_like(x)
    for group in step_groups([float(time) for time in table[:, 0]], share):
        velocity = curved(float(table[group.first, 0]), expected)
        for weight, length in zip(group.weights, table[group.first : group.stop, 1], strict=True):
            expected = expected - (velocity + weight * (velocity - before)) * float(length)
        before = velocity
    torch.testing.assert_close(moved(folded(table, share), x, curved), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("partial", [0, 1, 3])
def test_phases_keep_the_length_and_the_last_number_of_their_steps(partial: int) -> None:
    guide = guidance(Params(), is_edit=False)
    plain, cached = (phases(POINTS, SHIFT, guide, partial, share) for share in (0.0, SHARE))
    assert plain.keys() == cached.keys()
    for phase in PHASES:
        whole, fewer = (
            np.concatenate([part for name, part in found.items() if name.startswith(phase)] or [np.zeros((0, 4))])
            for found in (plain, cached)
        )
        assert fewer[:, 1].sum() == pytest.approx(whole[:, 1].sum(), abs=1e-6)
        assert fewer[-1:, 2].tolist() == whole[-1:, 2].tolist()
        assert set(fewer[:, 0]) <= set(whole[:, 0]) and not fewer[:1, 3].any()
    assert sum(map(len, cached.values())) == 24


# -- the runtime -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Miniature:
    models = load_plugin("bagel")
    return miniature(Subject(entry=find_entry("bagel"), models=models, spec=SPEC))


def ask_for(small: Miniature, name: str, **params: Any) -> SampleRequest:
    ask = next(ask for ask in small.asks if ask.name == f"sample {name!r}")
    return replace(
        ask, params={**ask.params, "num_timesteps": POINTS, **params}, outputs=(*(ask.outputs or ("image",)), PROGRESS)
    )


def served(small: Miniature, *asks: SampleRequest) -> tuple[Sequence[RequestOutcome], Counter[str]]:
    """Return the answers of requests sent together, and the passes of each node and its batches."""
    passes = Counter[str]()
    runtime = small.runtime(faults=lambda node, handles: passes.update({node: len(handles), f"{node} batches": 1}))
    outcomes = runtime.ask(*asks)
    assert [outcome.status for outcome in outcomes] == ["finished"] * len(asks), [each.cause for each in outcomes]
    assert runtime.leaks() == []
    return outcomes, passes


def images(outcome: RequestOutcome) -> list[np.ndarray]:
    return [np.asarray(item.array) for item in outcome.items if item.modality in ("image", PARTIAL_IMAGE)]


@pytest.mark.parametrize(
    ("name", "computed"), [("paint", 24), ("paint, unguided", 24), ("edit", 24), ("edit, text guided", 24)]
)
def test_half_of_the_steps_run_half_of_the_passes(name: str, computed: int, small: Miniature) -> None:
    (full,), every = served(small, ask_for(small, name))
    (half,), some = served(small, ask_for(small, name, step_cache=SHARE))
    assert every["combine_cfg"] - NOISE_PASSES == POINTS - 1
    assert some["combine_cfg"] - NOISE_PASSES == computed
    assert some["LLM"] < 0.55 * every["LLM"]
    told = [int(item.array[0]) for item in half.items if item.modality == PROGRESS]
    assert len(told) == computed and told == sorted(set(told)) and told[-1] == POINTS - 1
    apart = np.abs(images(half)[-1].astype(int) - images(full)[-1])
    assert apart.any() and apart.mean() < 8, "another image, and near"


def test_zero_is_the_image_of_a_request_without_the_parameter(small: Miniature) -> None:
    (plain,), every = served(small, ask_for(small, "paint"))
    (zero,), same = served(small, ask_for(small, "paint", step_cache=0.0))
    assert same == every and np.array_equal(images(plain)[0], images(zero)[0])


def test_images_with_and_without_it_share_passes(small: Miniature) -> None:
    asks = [ask_for(small, "paint", step_cache=share) for share in (0.0, SHARE, MOST_CACHED)]
    alone = [served(small, ask) for ask in asks]
    together, passes = served(small, *asks)
    apart = sum((each for _, each in alone), Counter[str]())
    assert passes["LLM"] == apart["LLM"] and passes["LLM batches"] < 0.7 * apart["LLM batches"]
    for (one,), outcome in zip((outcomes for outcomes, _ in alone), together, strict=True):
        assert np.abs(images(one)[0].astype(int) - images(outcome)[0]).max() <= 1


def test_partial_images_come_between_groups(small: Miniature) -> None:
    (whole,), _ = served(small, ask_for(small, "paint", step_cache=SHARE))
    ask = ask_for(small, "paint, one partial image", step_cache=SHARE, partial_images=3)
    (outcome,), _ = served(small, replace(ask, text=ask_for(small, "paint").text))
    *early, last = images(outcome)
    assert len(early) == 3 and np.array_equal(last, images(whole)[0])


# -- the option and the count ------------------------------------------------------------------------------------------


def test_the_deployment_sets_the_share_of_requests_without_one(reference: Any) -> None:
    def computed(processor: Processor, **params: Any) -> int | None:
        prompt = PromptRequest(text="a boat", params=Params(**params), outputs=frozenset({"image"}), max_seq_len=2048)
        return processor.process_prompt(prompt).usage.get("computed_steps")

    default, own = (Processor(reference.folder, kwargs) for kwargs in ({}, {"step_cache": SHARE}))
    assert computed(default) is None and computed(default, step_cache=SHARE) == 24
    assert computed(own) == 24 and computed(own, step_cache=0.3) == 35 and computed(own, step_cache=0.0) is None


@pytest.mark.parametrize("value", [0.9, True, "much"])
def test_an_option_out_of_its_range_is_refused(value: Any) -> None:
    assert SPEC.bound(None, {"step_cache": SHARE}).model_kwargs["step_cache"] == SHARE
    with pytest.raises(ConfigError, match="step_cache"):
        SPEC.bound(None, {"step_cache": value})


# -- the trained miniature ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The trained miniature in the runtime. latents: what its decoder got, in order."""

    runtime: LocalRuntime
    latents: list[Tensor]

    def drawn(self, scene: shapes.Scene, **params: Any) -> tuple[Tensor, shapes.Pixels]:
        """Return the latents and the picture of a scene."""
        own = {"width": shapes.SIDE, "height": shapes.SIDE, **params}
        ask = SampleRequest(text=scene.sentence, params=own, outputs=("image",), seed=1)
        self.latents.clear()
        (outcome,) = self.runtime.ask(ask)
        assert outcome.status == "finished", outcome.cause
        (latents,) = self.latents
        return latents, images(outcome)[0]


@contextmanager
def trained() -> Iterator[Trained]:
    spec = SPEC.bound(FOLDER, {})
    built, seen = build_nodes(spec, FOLDER), list[Tensor]()

    def see(module: Any, args: Any, ports: dict[str, Any]) -> None:
        seen.extend(x.clone() for x in ports["latents"])

    handle = built["vae_decoder"].module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield Trained(LocalRuntime(spec, FOLDER, built=built, processor=Processor(FOLDER, {})), seen)
    finally:
        handle.remove()


def test_half_of_the_passes_draw_what_is_asked_nearer_than_fewer_steps_do() -> None:
    _, scenes, _, _ = shapes.split(judge_shapes.SPLIT_SEED)
    errors: dict[str, list[float]] = {"cached": [], "fewer": []}
    settings: dict[str, dict[str, Any]] = {"cached": {"step_cache": SHARE}, "fewer": {"num_timesteps": POINTS // 2}}
    with trained() as mini:
        for scene in scenes[:SCENES]:
            full, _ = mini.drawn(scene)
            for name, params in settings.items():
                x, picture = mini.drawn(scene, **params)
                errors[name].append(float((x - full).norm() / full.norm()))
                assert shapes.shows(picture, scene), name
    assert 0 < np.mean(errors["cached"]) < 0.5 * np.mean(errors["fewer"]), errors
