"""Weights of eight bits: layers against the reference, and `qwen3_omni:mini` judged with them over HTTP."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from mstar_core.layers import Checkpoint, SparseMoE
from mstar_core.layers.quantize import quantize, quantized_weights
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.checkpoint.shipped import FOLDER
from mstar_qwen3omni.checkpoint.weights import TENSORS, load, own_tensors
from mstar_qwen3omni.model import new_module
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.thinker.thinker import Thinker
from tests.runtime.deployment import Deployment

from .mini_parts import SOUNDS, train
from .test_golden_http import OMNI
from .test_mini import LEAST, QUESTIONS, SPOKEN, judge, right, sounds
from .thinker_cases import CASES, DenseCache, golden_thinker, needs_weights, prefill, read

LAYER = 0.09
"""Relative error of what one mixture of experts adds, for exact inputs. Measured: 0.04 to 0.07."""

NODES = ("Thinker", "Talker")
"""Nodes with a cache: those that a deployment quantizes."""


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def seen_inputs(thinker: Thinker, case: str) -> list[torch.Tensor]:
    """Return the inputs of each mixture of experts while the prompt of a case is read."""
    found: list[torch.Tensor] = []
    true = SparseMoE.branch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseMoE, "branch", lambda self, x: (found.append(x), true(self, x))[1])
        prefill(thinker, read(case), DenseCache(), [])
    return found


@needs_weights
@pytest.mark.parametrize("case", CASES[:2])
def test_each_mixture_of_experts_stays_near_for_the_inputs_of_the_reference(case: str) -> None:
    """Layer by layer: over several layers of random weights the routers' near-ties part, whatever the rounding."""
    thinker = golden_thinker()
    other = copy.deepcopy(thinker)
    report = quantize(other, "fp8", rounds_inputs=other.rounds_inputs)
    assert {"gate_up_proj", "down_proj", "q_proj"} <= set(report.kinds)
    pairs = [
        (one, two)
        for one, two in zip(thinker.modules(), other.modules(), strict=False)
        if isinstance(one, SparseMoE) and isinstance(two, SparseMoE)
    ]
    for x, (exact, halved) in zip(seen_inputs(thinker, case), pairs, strict=True):
        assert 0 < error(halved(x), exact(x)) < LAYER


def test_the_declared_bytes_are_those_of_the_quantized_layers() -> None:
    (spec,), config = mstar_models(), OmniConfig()
    for name in NODES:
        with torch.device("meta"):
            module = new_module(name, config)
        counted = sum(2 * weight.numel() for _, weight in quantized_weights(module))
        assert spec.node(name).quantized_bytes == pytest.approx(counted, rel=1e-3), name


def test_questions_are_answered_in_one_process() -> None:
    config, files = read_config(FOLDER), Checkpoint.find(FOLDER)
    nodes = train("nodes").Nodes(config)
    for name in TENSORS:
        load(nodes[name], own_tensors(files, name), name, None)
    nodes.eval().requires_grad_(False)
    for name in NODES:
        report = quantize(nodes[name], "fp8", rounds_inputs=getattr(nodes[name], "rounds_inputs", False))
        assert report.kinds["gate_up_proj"].output_error_worst < 0.045
    assert right(nodes) >= LEAST


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    with (
        Deployment(served=OMNI, name="mini-fp8", weights_source="mini", quantization="fp8") as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield judge.served(client, "qwen3_omni")


def test_questions_about_pictures_clips_and_sounds_are_answered(ask: Any) -> None:
    verdict = judge.judge_text(ask, sounds.load(SOUNDS), QUESTIONS, workers=2)
    assert verdict["text"] >= LEAST, verdict


def test_spoken_answers_are_heard_right(ask: Any) -> None:
    tensors = sounds.load(SOUNDS)
    listeners = {"nearest": lambda voice: judge.nearest(tensors.answers, voice)}
    verdict = judge.judge_speech(ask, tensors, SPOKEN, listeners)
    assert verdict["nearest"] >= LEAST, verdict
