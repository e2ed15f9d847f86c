"""Warm-up by the model's samples: nodes without a warm-up of their own run before the first request."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mstar_bagel.plugin import mstar_models
from mstar_core.engine.base import Job
from mstar_core.worker.start.warmup import WARMUP, needs_samples, warm_walks
from tests.fakes.runner import FakeRunner

BAGEL = next(spec for spec in mstar_models() if spec.name == "bagel")


def zeros(job: Job) -> dict[str, torch.Tensor]:
    return {port: torch.zeros(1, dtype=torch.int64) for port in job.outputs}


def runners() -> dict[str, FakeRunner]:
    return {node.name: FakeRunner(node.name, zeros, lambda handle: [0] * 8) for node in BAGEL.nodes if node.of is None}


def test_every_image_size_of_the_samples_runs_once() -> None:
    made, reported = runners(), []
    warm_walks(BAGEL, 0, made, {"vit_encoder"}, 4096, reported.append)
    declared = {
        tuple(inputs["vit_image"]) for sample in BAGEL.samples for _, inputs in sample.segments if "vit_image" in inputs
    }
    assert declared
    assert {tuple(job.inputs["image"].shape) for job in made["vit_encoder"].seen} == declared
    assert all(job.inputs["image"].dtype is torch.uint8 for job in made["vit_encoder"].seen)
    assert reported
    assert all(not runner.open_handles for runner in made.values())


def test_loops_of_a_sample_run_a_few_iterations_only() -> None:
    made = runners()
    warm_walks(BAGEL, 0, made, {"combine_cfg"}, 4096, lambda name: None)
    steps = [job for job in made["combine_cfg"].seen if job.handle == WARMUP]
    assert steps and len(steps) <= 2 * len(BAGEL.samples)


def test_walks_with_a_node_elsewhere_do_not_run() -> None:
    made = runners()
    del made["LLM"]
    warm_walks(BAGEL, 0, made, {"vit_encoder"}, 4096, lambda name: None)
    assert made["vit_encoder"].seen == []


def test_a_failing_sample_is_logged_and_the_start_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    made = runners()
    made["vit_encoder"].fail_at = 0
    warm_walks(BAGEL, 0, made, {"vit_encoder"}, 4096, lambda name: None)
    assert "the warm-up of walk prefill_vit failed" in caplog.text


def test_only_modules_with_weights_and_no_warm_up_of_their_own_need_samples() -> None:
    class Prepared(nn.Linear):
        def warm_up(self) -> None: ...

    vit = BAGEL.node("vit_encoder")
    assert needs_samples(vit, nn.Linear(2, 2))
    assert not needs_samples(vit, Prepared(2, 2))
    assert not needs_samples(vit, nn.Identity())
