"""Weights of eight bits: errors against the reference, and `bagel:mini` judged with them in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mstar_bagel.checkpoint.config import Sizes
from mstar_bagel.checkpoint.shipped import FOLDER
from mstar_bagel.nodes.language import BagelLLM, MixedAttention
from mstar_bagel.plugin import spec
from mstar_core.layers import quantize as float8
from mstar_core.layers.linear import QuantizedLinear
from mstar_core.layers.quantize import QuantizationReport, quantize, quantized_weights

from .conftest import Built, Run, build
from .test_mini import LEAST, SCENES, drawn

HIDDEN = 0.12
"""Relative error of hidden states and logits: random weights add the errors of all layers. Measured: 0.09."""

VELOCITY = 0.12
"""Relative error of the velocities of all steps along the reference's path. Measured: docs/performance.md."""

Patch = pytest.MonkeyPatch


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def halved(built: Built) -> tuple[Built, QuantizationReport]:
    """Return the model with eight-bit weights, as a deployment on the CPU has them."""
    llm = copy.deepcopy(built.llm)
    report = quantize(llm, "fp8", rounds_inputs=llm.rounds_inputs)
    return replace(built, llm=llm), report


@pytest.fixture(scope="module")
def small(reference: Any) -> Built:
    return halved(reference)[0]


@pytest.fixture(scope="module")
def mini() -> Built:
    return build(FOLDER)


def test_both_experts_of_each_layer_are_quantized_and_nothing_else(mini: Built) -> None:
    made, report = halved(mini)
    layers = mini.sizes.language.layers
    twice = {f"{name}_proj{expert}" for name in "qkvo" for expert in ("", "_moe_gen")}
    assert set(report.kinds) == twice | {"gate_proj", "up_proj", "down_proj"}
    assert {report.kinds[name].layers for name in twice} == {layers}
    assert report.kinds["up_proj"].layers == 2 * layers
    kept = [name for name, part in made.llm.named_modules() if isinstance(part, torch.nn.Linear)]
    assert kept and not [name for name in kept if "layers." in name]
    assert report.after_bytes < 0.3 * report.before_bytes, "the CPU computes in float32"
    assert max(kind.output_error_worst for kind in report.kinds.values()) < 0.045


def test_joined_projections_compute_the_same(mini: Built) -> None:
    made, _ = halved(mini)
    plain, joined = made.llm.language_model.model.blocks[0].self_attn, copy.deepcopy(made.llm)
    other = joined.language_model.model.blocks[0].self_attn
    assert isinstance(other, MixedAttention) and other.fuse_projections() and isinstance(other.q_proj, QuantizedLinear)
    x = torch.randn(5, mini.sizes.language.width)
    for one, two in ((plain.und, other.und), (plain.gen, other.gen)):
        expected = torch.cat([one.query(x), one.key(x), one.value(x)], dim=1)
        torch.testing.assert_close(two.project_packed(x, is_whole=True), expected, atol=1e-5, rtol=1e-5)
    assert other.unfuse() and other.und.joined is None


def test_the_declared_bytes_are_those_of_the_quantized_layers() -> None:
    with torch.device("meta"):
        module = BagelLLM(Sizes())
    counted = sum(2 * weight.numel() for _, weight in quantized_weights(module))
    node = next(node for node in spec(Sizes()).nodes if node.name == "LLM")
    assert node.quantized_bytes == pytest.approx(counted, rel=1e-3)


def test_text_stays_near_the_reference(golden: Any, small: Built) -> None:
    expected, run = golden.tensors("text"), Run(small)
    hidden = run.text(expected["chat.input_ids"].tolist(), run.caches["main"])
    assert 0 < error(hidden, expected["chat.hidden"]) < HIDDEN
    assert error(small.llm.head(hidden), expected["chat.prefill_logits"]) < HIDDEN


def test_velocities_along_the_path_of_the_reference_stay_near(painting: str, golden: Any, small: Built) -> None:
    assert 0 < velocity_error(golden, small, painting) < VELOCITY


def velocity_error(golden: Any, built: Built, painting: str) -> float:
    """Return the relative error of main's velocity at the first step, whose latents the reference stores."""
    expected, run = golden.tensors(painting), Run(built)
    run.read(golden, painting)
    noise, wanted = expected["init_noise"], expected["step0.v_main"]
    height, width = (side // built.sizes.token_pixels for side in golden.cases[painting]["output_hw"])
    actual = run.velocity(noise.view(height, width, -1), 1.0, run.caches["main"])
    return error(actual.flatten(), wanted.flatten())


def test_unseen_scenes_are_drawn_in_one_process(mini: Built) -> None:
    assert drawn(halved(mini)[0], SCENES) >= LEAST


def scales_of_one(patch: Patch) -> None:
    true = float8.to_float8
    patch.setattr(float8, "to_float8", lambda *given: replace(true(*given), scale=torch.ones(len(given[0]))))


def scales_of_the_next_output(patch: Patch) -> None:
    true = float8.to_float8

    def shifted(*given: Any) -> Any:
        made = true(*given)
        assert made.scale is not None
        return replace(made, scale=made.scale.flip(0) * 3)

    patch.setattr(float8, "to_float8", shifted)


@pytest.mark.parametrize("broken", [scales_of_one, scales_of_the_next_output])
def test_a_broken_quantization_is_noticed(broken: Callable[[Patch], None], mini: Built, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert drawn(halved(mini)[0], SCENES // 2) < LEAST
