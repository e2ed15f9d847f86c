"""Workloads against embedded checkpoints: the checkpoint's own processor takes every request of every workload."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mstar_core.errors import RequestError
from mstar_core.plugin import SampleInputs, WorkloadSpec
from mstar_core.workloads import ServedModel
from mstarctl.bench.load.workloads import source_of
from mstarctl.bench.show.workloads import card_of
from mstarctl.plugins import Plugins
from mstarctl.start.target import find, resolve_target
from tests.families.families import SPECS
from tests.families.test_samples import EMBEDDED, ROBOTS, accepted, checkpoint

PLUGINS = Plugins.discover()
PAIRS = [(model, source, workload) for model, source in EMBEDDED for workload in PLUGINS.workloads(SPECS[model])]


@pytest.mark.parametrize(
    ("model", "source", "workload"), PAIRS, ids=lambda value: value.name if isinstance(value, WorkloadSpec) else value
)
def test_a_checkpoint_takes_the_requests_of_a_workload(model: str, source: str, workload: WorkloadSpec) -> None:
    folder = checkpoint(model, source)
    options = resolve_target(find(f"{model}:{source}", PLUGINS)).model_kwargs
    spec = SPECS[model].bound(folder, options)
    card = replace(card_of(spec), is_tiny=True)
    for request in itertools.islice(source_of(workload)(card, 0), 3):
        inputs = SampleInputs(
            name="x", title="x", outputs=request.outputs, text=request.text, files=request.files, params=request.params
        )
        accepted(spec, folder, inputs)


def test_a_state_of_another_size_is_refused() -> None:
    """Without the published sizes, the robot workload sends eight values to an arm of two joints."""
    folder = checkpoint("pi05", "mini")
    spec = SPECS["pi05"].bound(folder, {**SPECS["pi05"].model_kwargs, "action_dim": 2})
    assert (spec.robot_facts()["state"], spec.robot_facts()["action"]) == (2, 2)
    (robot,) = PLUGINS.workloads(SPECS["pi05"])
    sized = next(source_of(robot)(card_of(spec), 0))
    assert len(sized.params["robot_state"]) == 2 and sized.expected["shape"] == [spec.robot_facts()["horizon"], 2]
    unsized = next(source_of(robot)(ServedModel(name="pi05"), 0))
    with pytest.raises(RequestError, match="robot_state has 8 values"):
        accepted(
            spec,
            folder,
            SampleInputs(
                name="x", title="x", outputs=("action",), text="go", files=unsized.files, params=unsized.params
            ),
        )


@pytest.mark.parametrize(("name", "count"), ROBOTS.items())
def test_a_deployment_publishes_the_state_of_its_robot(name: str, count: int) -> None:
    target = find(name, PLUGINS)
    facts = target.spec.bound(None, resolve_target(target).model_kwargs).robot_facts()
    assert facts["state"] == count and len(facts["cameras"]) == 3
