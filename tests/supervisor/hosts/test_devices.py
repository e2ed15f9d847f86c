"""Room of a deployment on its hosts, and the GPUs that were reserved."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mstar_core.cluster.placer import Bundle
from mstar_core.config.deployment import DeploymentSpec, HostPlan, Plan, RankPlan
from mstar_core.config.resolved import RayConfig
from mstar_core.errors import StartError
from mstar_core.supervisor.hosts.devices import bundle_of, with_reserved

HOSTS = (HostPlan(name="", address="10.0.0.1"), HostPlan(name="b", address="10.0.0.2", node="n", title="gpu-b"))


def spec(*places: tuple[str, str], **fields: Any) -> DeploymentSpec:
    """Return a deployment with a rank on each of these hosts and devices."""
    ranks = tuple(RankPlan(rank=n, host=host, device=device, nodes=("LLM",)) for n, (host, device) in enumerate(places))
    made = DeploymentSpec(
        name="d", model="m", plugin="p", run_dir="/r", log_dir="/l", plan=Plan(ranks=ranks, placements=()), hosts=HOSTS
    )
    return msgspec.structs.replace(made, **fields)


def devices(plan: Plan) -> list[str]:
    return [rank.device for rank in plan.ranks]


def test_a_bundle_has_the_gpus_and_a_core_for_each_process() -> None:
    deployment = spec(("", "cuda:0"), ("b", "cuda:0"), ("b", "cuda:1"), ("b", "cuda:1"))
    first = Bundle(host="", gpus=1, cpus=3.0, address="10.0.0.1")
    second = Bundle(host="b", gpus=2, cpus=3.0, node="n", address="10.0.0.2")
    assert [bundle_of(deployment, host) for host in HOSTS] == [first, second]


def test_ranks_get_the_reserved_gpus_and_keep_those_that_fit() -> None:
    deployment = spec(("", "cuda:0"), ("b", "cuda:0"), ("b", "cuda:1"), ("b", "cuda:1"), ("b", "cpu"))
    plan = with_reserved(deployment, {"": (0,), "b": (6, 1)})
    assert devices(plan) == ["cuda:0", "cuda:6", "cuda:1", "cuda:1", "cpu"]


def test_too_few_gpus_are_refused_with_the_name_of_the_host() -> None:
    with pytest.raises(StartError, match="too few GPUs were reserved on host gpu-b"):
        with_reserved(spec(("b", "cuda:0"), ("b", "cuda:1")), {"b": (0,)})


def test_a_gpu_that_the_configuration_names_must_be_the_reserved_one() -> None:
    deployment = spec(("b", "cuda:2"), ray=RayConfig(devices=("b:2",)))
    assert devices(with_reserved(deployment, {"b": (2,)})) == ["cuda:2"]
    with pytest.raises(StartError, match="GPU 2 of host gpu-b was not reserved"):
        with_reserved(deployment, {"b": (3,)})
    free = spec(("b", "cuda:2"), ray=RayConfig(devices=("b",)))
    assert devices(with_reserved(free, {"b": (3,)})) == ["cuda:3"]
