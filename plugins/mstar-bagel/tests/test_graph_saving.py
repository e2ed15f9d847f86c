"""Images that go on after a death: denoising begins in the saved steps, and the image is that of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from mstar_bagel.graph import SAVED_STEPS
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.messages.requests import Resume, SavedLoop
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.loader import find_entry, load_plugin
from mstar_core.plugin.surface import PROGRESS

STEPS = 14
OTHERS = 1
"""Passes of the node of the steps that are none: the first noise."""


@pytest.fixture(scope="module")
def small() -> Miniature:
    models = load_plugin("bagel")
    spec = next(spec for spec in models if spec.name == "bagel")
    return miniature(Subject(entry=find_entry("bagel"), models=models, spec=spec))


GUIDED = {"cfg_interval": [0.0, 1.0]}
"""All steps are one run of the loop."""


def picture(small: Miniature, name: str, **changes: object) -> SampleRequest:
    ask = next(ask for ask in small.asks if ask.name == f"sample {name!r}")
    outputs = (*(ask.outputs or ("image",)), PROGRESS)
    params = {**ask.params, **changes, "num_timesteps": STEPS + 1}
    return replace(ask, is_journaled=True, params=params, outputs=outputs)


def served(
    small: Miniature, ask: SampleRequest, saved: Mapping[str, SavedLoop] | None = None
) -> tuple[RequestOutcome, int]:
    """Return an answer, and the steps that were computed for it. saved: states that a new attempt is given."""
    passes = Counter[str]()
    runtime = small.runtime(faults=lambda node, handles: passes.update([node]))
    again = ask if saved is None else replace(ask, resume=Resume(attempt=2, saved=dict(saved)))
    (outcome,) = runtime.ask(again)
    assert outcome.status == "finished", outcome.cause
    assert runtime.leaks() == []
    return outcome, passes["combine_cfg"] - OTHERS


def progress(outcome: RequestOutcome) -> list[int]:
    return [int(item.array[0]) for item in outcome.items if item.modality == PROGRESS]


def images(outcome: RequestOutcome) -> list[tuple[str, bytes]]:
    return [(item.modality, item.array.tobytes()) for item in outcome.items if item.modality != PROGRESS]


def test_latents_are_saved_every_few_steps_and_before_the_last(small: Miniature) -> None:
    outcome, steps = served(small, picture(small, "paint, unguided"))
    assert steps == STEPS and progress(outcome) == list(range(1, STEPS + 1))
    ((_, states),) = outcome.saved.items()
    assert [state.iteration for state in states] == [*range(SAVED_STEPS, STEPS - 1, SAVED_STEPS), STEPS - 1]
    assert all(state.values["latents"].dtype == "float32" for state in states)


def test_denoising_that_begins_in_a_saved_step_gives_the_same_image(small: Miniature) -> None:
    ask = picture(small, "paint", **GUIDED)
    whole, _ = served(small, ask)
    ((place, states),) = whole.saved.items()
    for state in states:
        outcome, steps = served(small, ask, {place: state})
        assert images(outcome) == images(whole)
        assert outcome.counts == whole.counts, "the counts are those of a whole run"
        assert progress(outcome) == list(range(state.iteration + 1, STEPS + 1))
        assert steps == STEPS - state.iteration
        later = [each.iteration for each in states if each.iteration > state.iteration]
        assert [each.iteration for each in outcome.saved.get(place, ())] == later


def test_the_image_follows_from_the_state_and_not_from_the_seed(small: Miniature) -> None:
    """A state of other numbers gives another image: the comparison above can fail."""
    ask = picture(small, "paint", **GUIDED)
    whole, _ = served(small, ask)
    ((place, states),) = whole.saved.items()
    latents = states[0].values["latents"]
    changed = replace_data(states[0], np.zeros(latents.shape, np.float32).tobytes())
    assert images(served(small, ask, {place: changed})[0]) != images(whole)


def replace_data(state: SavedLoop, data: bytes) -> SavedLoop:
    latents = state.values["latents"]
    changed = type(latents)(dtype="float32", shape=latents.shape, data=data)
    return SavedLoop(iteration=state.iteration, values={**state.values, "latents": changed})


@pytest.mark.parametrize("name", ["paint, guided in the middle", "paint, one partial image"])
def test_runs_before_the_interrupted_one_repeat_their_last_step_only(small: Miniature, name: str) -> None:
    ask = picture(small, name)
    whole, _ = served(small, ask)
    latest = {place: states[-1] for place, states in whole.saved.items()}
    assert len(latest) > 1
    outcome, steps = served(small, ask, latest)
    assert images(outcome) == images(whole), "partial images included"
    assert len(latest) <= steps < STEPS // 2


def test_a_request_without_further_attempts_saves_nothing(small: Miniature) -> None:
    outcome, _ = served(small, replace(picture(small, "paint", **GUIDED), is_journaled=False))
    assert not outcome.saved


def test_a_state_of_other_ports_is_not_used(small: Miniature) -> None:
    ask = picture(small, "paint", **GUIDED)
    whole, _ = served(small, ask)
    ((place, states),) = whole.saved.items()
    foreign = SavedLoop(iteration=states[0].iteration, values={"other": states[0].values["latents"]})
    outcome, steps = served(small, ask, {place: foreign})
    assert images(outcome) == images(whole) and steps == STEPS


def test_nodes_of_a_loop_on_two_ranks_begin_in_the_same_step(small: Miniature) -> None:
    ask = picture(small, "paint", **GUIDED)
    whole, _ = served(small, ask)
    ((place, states),) = whole.saved.items()
    runtime = small.runtime(ranks=2)
    (outcome,) = runtime.ask(replace(ask, resume=Resume(attempt=2, saved={place: states[1]})))
    assert images(outcome) == images(whole)
    assert progress(outcome) == list(range(states[1].iteration + 1, STEPS + 1))
    assert [state.iteration for state in outcome.saved[place]] == [state.iteration for state in states[2:]]
    assert runtime.leaks() == []
