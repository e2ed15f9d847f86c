"""Generation of images against the reference: times, branches, every velocity, guidance, latents and pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mstar_bagel.nodes.flow import FlowSteps, guided
from mstar_bagel.params import RENORM_TYPES, Params, guidance
from mstar_bagel.request.schedule import are_guided, flow_times, phases, steps

from .conftest import BRANCHES

CPU = torch.device("cpu")
VELOCITY = 5e-4
LATENTS = 2e-4
FORMULA = 1e-5
BYTES_OFF = 0.005
"""Share of bytes that may differ by one. Source: README of the vectors."""


def test_flow_times_equal_the_reference(golden: Any) -> None:
    for schedule in golden.json("schedules.json"):
        actual = flow_times(schedule["num_timesteps"], schedule["timestep_shift"])
        expected = np.array(schedule["t"], dtype=np.float32)
        np.testing.assert_allclose(actual[: len(expected)], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", range(54))
def test_guidance_equals_the_reference(number: int, golden: Any) -> None:
    cases = golden.cases["cfg_combine"]
    if number >= len(cases):
        pytest.skip(f"runs when MSTAR_GOLDEN names a set of {number + 1} guidance cases")
    inputs, case = golden.tensors("cfg_combine"), cases[number]
    actual = guided(
        inputs["v"],
        inputs["v_cfg_text"],
        inputs["v_cfg_img"],
        text_scale=case["cfg_text_scale"],
        image_scale=case["cfg_img_scale"],
        renorm=RENORM_TYPES.index(case["cfg_renorm_type"]),
        least=case["cfg_renorm_min"],
    )
    torch.testing.assert_close(actual, inputs[f"case{case['case']}"], atol=FORMULA, rtol=0)


def test_a_painting_equals_the_reference_step_by_step(painting: str, golden: Any, run: Any) -> None:
    case, expected = golden.cases[painting], golden.tensors(painting)
    run.read(golden, painting)
    for name in BRANCHES:
        assert run.caches[name].length == case["branch_cache_len"][name]
        assert run.caches[name].position == case["branch_rope_position"][name]
    params = Params(**{**case["params"], "cfg_interval": tuple(case["params"]["cfg_interval"])})
    guide = guidance(params, is_edit="image" in {kind for kind, _ in golden.prompt(painting)})
    grid = steps(params.num_timesteps, params.timestep_shift)
    is_guided = are_guided(grid[:, 0], guide)
    np.testing.assert_allclose(grid[:, 0], expected["t"].numpy(), atol=1e-6, rtol=0)
    combine, pixels = FlowSteps(run.built.sizes.latent_width, CPU), run.built.sizes.token_pixels
    height, width = (side // pixels for side in case["output_hw"])
    x = expected["init_noise"].view(height, width, -1)
    for number, (time, length, *_) in enumerate(grid):
        raw = {name: expected.get(f"step{number}.v_{name}") for name in BRANCHES}
        assert is_guided[number] == case["guided_steps"][number]
        actual = {name: run.velocity(x, float(time), run.caches[name]) for name in BRANCHES if raw[name] is not None}
        for name, velocity in actual.items():
            torch.testing.assert_close(velocity.flatten(0, 1), raw[name], atol=VELOCITY, rtol=0)
        sides = {
            port: [actual[name]]
            for port, name in (("v_text", "cfg_text"), ("v_img", "cfg_img"))
            if name in actual and is_guided[number]
        }
        x = combine(
            latents=[x],
            v=[actual["main"]],
            guidance=[np.array([*guide.numbers(), len(grid)], dtype=np.float32)],
            times=[grid],
            step=np.array([number]),
            seeds=np.zeros(1),
            **sides,
        )["latents"][0]
        torch.testing.assert_close(x.flatten(0, 1), expected["latents_after_step"][number], atol=LATENTS, rtol=0)
        assert length > 0
    torch.testing.assert_close(x.flatten(0, 1), expected["final_latents"], atol=LATENTS, rtol=0)


def test_pixels_equal_the_reference(painting: str, golden: Any, reference: Any, decoded: None) -> None:
    case, expected = golden.cases[painting], golden.tensors(painting)
    height, width = (side // reference.sizes.token_pixels for side in case["output_hw"])
    actual = reference.decoder.decode(expected["final_latents"].view(height, width, -1))
    torch.testing.assert_close(actual, expected["decoded_float"][0], atol=LATENTS, rtol=0)
    check_pixels(reference.decoder.pixels(actual).numpy(), expected["pixels_uint8"].numpy())


def check_pixels(found: np.ndarray, wanted: np.ndarray) -> None:
    apart = np.abs(found.astype(int) - wanted.astype(int))
    assert found.shape == wanted.shape and apart.max() <= 1
    assert np.count_nonzero(apart) <= BYTES_OFF * apart.size


def test_the_first_noise_is_that_of_the_reference_for_a_seed(painting: str, golden: Any, reference: Any) -> None:
    case, expected = golden.cases[painting], golden.tensors(painting)["init_noise"]
    noise = FlowSteps(reference.sizes.latent_width, CPU)
    height, width = (side // reference.sizes.token_pixels for side in case["output_hw"])
    grid = [np.zeros((height, width), np.uint8)] * 2
    same, other = noise(grid=grid, seeds=np.array([case["noise_seed"], case["noise_seed"] + 1]))["latents"]
    assert torch.equal(same.flatten(0, 1), expected)
    assert not torch.equal(other, same)


# -- phases -----------------------------------------------------------------------------------------------------------


def counted(found: dict[str, np.ndarray]) -> dict[str, int]:
    return {name.removeprefix("times_"): len(part) for name, part in found.items()}


def test_default_text_to_image_needs_ninety_forwards() -> None:
    params = Params()
    actual = counted(phases(params.num_timesteps, params.timestep_shift, guidance(params, is_edit=False)))
    assert actual == {"guided": 41, "after": 8}
    assert 2 * actual["guided"] + actual["after"] == 90


def test_phases_hold_every_step_once_and_in_order(painting: str, golden: Any) -> None:
    case = golden.cases[painting]
    params = Params(**{**case["params"], "cfg_interval": tuple(case["params"]["cfg_interval"])})
    actual = phases(params.num_timesteps, params.timestep_shift, guidance(params, is_edit=True))
    assert np.array_equal(np.concatenate(list(actual.values())), steps(params.num_timesteps, params.timestep_shift))
    expected = case["guided_steps"]
    first = expected.index(True)
    sizes = {"before": first, "guided": sum(expected), "after": len(expected) - first - sum(expected)}
    assert counted(actual) == {name: size for name, size in sizes.items() if size}


def test_a_step_is_guided_below_the_open_and_at_the_closed_end() -> None:
    guide = guidance(Params(cfg_interval=(0.25, 0.75)), is_edit=False)
    times = np.array([0.25, 0.26, 0.75, 0.76], dtype=np.float32)
    assert are_guided(times, guide).tolist() == [False, True, True, False]


def test_a_text_scale_of_one_switches_guidance_off() -> None:
    plain = guidance(Params(cfg_text_scale=1.0, cfg_img_scale=2.0), is_edit=True)
    assert counted(phases(6, 3.0, plain)) == {"after": 5}
