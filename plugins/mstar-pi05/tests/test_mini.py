"""The trained miniature `pi05:mini`. It reaches targets over HTTP, and a broken part is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import judge_arm
import pytest
import torch

from mstar_core.client import MStarClient
from mstar_core.layers.quantize import quantize
from mstar_pi05 import arm
from mstar_pi05.mini import FOLDER
from tests.runtime.deployment import Deployment

from .arm_policy import ArmPolicy, reached
from .test_http import PI05

SCENES = 12
LEAST = 0.8
"""Share of few scenes that an intact miniature reaches, and a broken one does not."""


@pytest.fixture(scope="module")
def client() -> Iterator[MStarClient]:
    with Deployment(served=PI05, name="mini", weights_source="mini") as running, MStarClient(running.url) as client:
        yield client


def test_the_arm_reaches_named_targets_over_http(client: MStarClient) -> None:
    verdict = judge_arm.judge(judge_arm.served(client), SCENES, workers=2)
    assert verdict["reached"] >= 0.9, verdict


@pytest.fixture
def policy() -> ArmPolicy:
    return ArmPolicy.of(FOLDER)


def share(policy: ArmPolicy) -> float:
    return reached(policy, arm.draw(77, SCENES), judge_arm.CHUNKS)


def test_the_arm_reaches_named_targets_in_one_process(policy: ArmPolicy) -> None:
    assert share(policy) >= LEAST


def test_the_arm_reaches_named_targets_with_weights_and_inputs_of_eight_bits(policy: ArmPolicy) -> None:
    own = policy.policy
    report = quantize(own, "fp8", rounds_inputs=own.rounds_inputs, kept=own.unquantized)
    assert report.after_bytes < 0.3 * report.before_bytes, "the CPU computes in float32"
    assert share(policy) >= LEAST


def test_a_causal_mask_is_noticed(policy: ArmPolicy) -> None:
    policy.causal = True
    assert share(policy) < LEAST


def test_camera_positions_that_are_lost_are_noticed(policy: ArmPolicy) -> None:
    weight = policy.cameras.tower.embeddings.position_embedding.weight
    weight.copy_(torch.zeros_like(weight))
    assert share(policy) < LEAST


def test_actions_that_are_not_denormalised_are_noticed(policy: ArmPolicy) -> None:
    policy.processor._action_moments = None
    assert share(policy) < LEAST
