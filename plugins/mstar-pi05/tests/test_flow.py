"""The flow against the reference: time, velocity and actions of each step, tables, and an unchanged cache."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from mstar_core.layers.quantize import quantize, quantized_weights
from mstar_pi05.checkpoint.config import Sizes
from mstar_pi05.nodes.expert import Modulation
from mstar_pi05.nodes.flow import distinct_times, embedded, flow_times
from mstar_pi05.nodes.policy import Policy

from .conftest import ITEMS, SPEC

STORED_TIMES = {"velocity": 5e-5, "actions": 2e-5, "condition": 1e-5}
OWN_TIMES = {"velocity": 1e-3, "actions": 2e-4, "embedding": 3e-4}


def close(made: Any, wanted: Any, tolerance: float) -> None:
    torch.testing.assert_close(made, wanted, atol=tolerance, rtol=0)


def test_the_flow_begins_at_noise_and_never_asks_at_data(golden: Any) -> None:
    times = flow_times(golden.steps)
    assert times[0] == 1.0
    assert times[-1] == pytest.approx(1 / golden.steps)
    close(torch.tensor(times), golden.expected["time"][:, 0], 2e-7)


def test_time_and_condition_equal_the_reference(golden: Any, reference: Any) -> None:
    stored, time = golden.expected["time"][:, 0], reference.policy.time
    width = golden.config["expert"]["width"]
    close(embedded(stored, width, *time.periods).float(), golden.expected["time_embedding"], 1e-5)
    close(
        embedded(torch.tensor(flow_times(golden.steps)), width, *time.periods).float(),
        golden.expected["time_embedding"],
        OWN_TIMES["embedding"],
    )
    for item in ITEMS:
        condition = time(golden.expected["time"][:, item])
        close(condition, golden.expected["time_cond"][:, item], STORED_TIMES["condition"])


def test_the_first_hidden_states_equal_the_reference(golden: Any, exact: Any) -> None:
    exact.prefill(*ITEMS)
    for item in ITEMS:
        positions = golden.length(item) + torch.arange(golden.horizon)
        assert torch.equal(positions, golden.expected["suffix_position_ids"][item])
        cache = exact.cache.plan((item, golden.horizon), writes=False)
        rows = torch.zeros(golden.horizon, dtype=torch.int64)
        hidden = exact.policy.suffix_hidden(cache, positions, golden.inputs["noise"][item], rows)
        close(hidden, golden.expected["suffix_hidden_step0"][item], 2e-5)


@pytest.mark.parametrize(("times", "tolerance"), [("exact", STORED_TIMES), ("run", OWN_TIMES)])
def test_every_step_equals_the_reference(times: str, tolerance: Any, golden: Any, request: Any) -> None:
    """Run at the reference's stored times and at the plugin's own."""
    run, steps = request.getfixturevalue(times), golden.steps
    run.prefill(*ITEMS)
    x, velocity = golden.expected["x_before_step"], golden.expected["velocity"]
    for number in range(steps):
        rows = run.policy.table.at(torch.full((golden.horizon,), steps), torch.full((golden.horizon,), number))
        for item in ITEMS:
            positions = golden.length(item) + torch.arange(golden.horizon)
            cache = run.cache.plan((item, golden.horizon), writes=False)
            actual = run.policy.velocity(cache, positions, x[number, item], rows)
            close(actual, velocity[number, item], tolerance["velocity"])
        moved = run.step([(item, x[number, item], number) for item in ITEMS], steps)
        after = x[number + 1] if number + 1 < steps else golden.expected["actions"]
        close(torch.stack(moved), after, tolerance["actions"])


@pytest.mark.parametrize("together", [True, False])
def test_actions_at_the_stored_times_equal_the_reference(together: bool, golden: Any, exact: Any) -> None:
    close(torch.stack(whole(exact, together)), golden.expected["actions"], STORED_TIMES["actions"])


@pytest.mark.parametrize("together", [True, False])
def test_actions_at_our_own_times_equal_the_reference(together: bool, golden: Any, run: Any) -> None:
    close(torch.stack(whole(run, together)), golden.expected["actions"], OWN_TIMES["actions"])


def whole(run: Any, together: bool) -> list[torch.Tensor]:
    actions = []
    for items in [ITEMS] if together else [(item,) for item in ITEMS]:
        run.prefill(*items)
        actions += run.flow(*items)
    return actions


def test_requests_at_different_steps_share_a_pass(golden: Any, run: Any, pair: tuple[int, int]) -> None:
    """The second request starts three steps after the first and is prefilled meanwhile."""
    steps, late = golden.steps, 3
    first, second = pair
    starts, x = {first: 0, second: late}, {item: golden.inputs["noise"][item] for item in pair}
    run.prefill(first)
    for tick in range(steps + late):
        if tick == late:
            run.prefill(second)
        rows = [(item, x[item], tick - begin) for item, begin in starts.items() if 0 <= tick - begin < steps]
        for (item, _, _), moved in zip(rows, run.step(rows, steps), strict=True):
            x[item] = moved
    close(torch.stack([x[item] for item in pair]), golden.expected["actions"][list(pair)], OWN_TIMES["actions"])


def test_requests_with_different_numbers_of_steps_share_a_pass(
    golden: Any, reference: Any, run: Any, pair: tuple[int, int]
) -> None:
    """Each request has its own number of steps."""
    run.prefill(*pair)
    noise, horizon, cache = golden.inputs["noise"], golden.horizon, run.cache
    count = torch.tensor([4, 7]).repeat_interleave(horizon)
    positions = torch.cat([golden.length(item) + torch.arange(horizon) for item in pair])
    actual = reference.acting(
        kv=cache.plan(*((item, horizon) for item in pair), writes=False),
        positions=positions,
        actions=noise[list(pair)].flatten(0, 1),
        scale=torch.ones(2 * horizon, 32),
        offset=torch.zeros(2 * horizon, 32),
        num_steps=count,
        step=torch.full_like(count, 2),
    )["actions"].unflatten(0, (2, horizon))
    for row, (item, steps) in enumerate(zip(pair, (4, 7), strict=True)):
        close(actual[row], run.step([(item, noise[item], 2)], steps)[0], 1e-5)


def test_the_cache_is_untouched_after_the_loop(golden: Any, run: Any) -> None:
    def digest() -> list[str]:
        rows = [*run.cache.keys, *run.cache.values]
        return [hashlib.sha256(value.numpy().tobytes()).hexdigest() for row in rows for value in row.values()]

    run.prefill(*ITEMS)
    before = digest()
    run.flow(*ITEMS)
    assert digest() == before
    assert len(before) == 2 * len(ITEMS) * golden.config["language"]["layers"]


def test_tables_give_what_the_dense_layers_give(golden: Any, reference: Any) -> None:
    """The served policy has no dense layers; its table contains every time of every flow."""
    most = 20
    times, rows = distinct_times(most)
    expected = reference.policy.expert.modulations(reference.policy.time(times))
    table = reference.acting.table
    assert torch.equal(table.modulations, expected) and torch.equal(table.rows, rows)
    assert len(expected) == 2 * golden.config["expert"]["layers"] + 1
    for steps in (1, 7, golden.steps, most):
        actual = times[table.at(torch.full((steps,), steps), torch.arange(steps))]
        assert torch.equal(actual, torch.tensor(flow_times(steps)))
    assert all(norm.dense is None for norm in reference.acting.expert.norms)


def test_slices_of_a_branch_are_summed_and_rounded_before_their_gate(reference: Any) -> None:
    """This is the reference of the GPU kernel for split-K slices."""
    table, norm = reference.acting.table, reference.acting.expert.norms[3]
    rows, width = torch.tensor([1, 0, 2]), table.modulations.shape[-1] // 3
    x, slices = torch.randn(3, width), torch.randn(4, 3, width)
    modulation = Modulation(table, rows, torch.bfloat16)
    actual = modulation.normed(x, slices, norm, 3)
    gate = table.modulations[2, rows, 2 * width :]
    close(actual[0], x + gate * slices.sum(0).bfloat16().float(), 1e-5)
    scale, shift = table.modulations[3, rows, :width], table.modulations[3, rows, width : 2 * width]
    wide = actual[0] / actual[0].square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(actual[1], (wide * (1 + scale) + shift).bfloat16(), atol=1e-2, rtol=1e-2)
    assert modulation.normed(x, None, norm, len(table.modulations) - 1)[1].dtype == torch.float32


def test_the_robots_actions_are_one_factor_and_one_term_away(golden: Any, reference: Any, run: Any) -> None:
    run.prefill(0)
    horizon = golden.horizon
    scale, offset = torch.rand(horizon, 32), torch.rand(horizon, 32)
    actual = reference.acting(
        kv=run.cache.plan((0, horizon), writes=False),
        positions=golden.length(0) + torch.arange(horizon),
        actions=golden.inputs["noise"][0],
        scale=scale,
        offset=offset,
        num_steps=torch.full((horizon,), 10),
        step=torch.zeros(horizon, dtype=torch.int64),
    )
    close(actual["robot_actions"], actual["actions"] * scale + offset, 1e-6)


def test_half_precision_stays_near(golden: Any, reference: Any, run: Any, models: Any) -> None:
    """As on a GPU: matrices and cache in bfloat16; cameras, norms, time and actions in float32."""
    policy = models(reference.folder, torch.bfloat16).get_submodule(reference.spec.node("LLM"))
    half = type(run)(golden, reference, policy)
    half.features = lambda *items: [feature.bfloat16() for feature in run.features(*items)]
    half.prefill(*ITEMS)
    assert {value.dtype for row in half.cache.keys for value in row.values()} == {torch.bfloat16}
    actions = torch.stack(half.flow(*ITEMS))
    assert actions.dtype == torch.float32
    apart = (actions - golden.expected["actions"]).abs()
    assert 1e-4 < apart.max() < 0.3 and apart.mean() < 0.03


def test_the_declared_bytes_are_those_of_the_quantized_layers(golden: Any) -> None:
    with torch.device("meta"):
        policy = Policy(Sizes())
    counted = sum(2 * weight.numel() for _, weight in quantized_weights(policy, kept=policy.unquantized))
    assert next(node for node in SPEC.nodes if node.name == "LLM").quantized_bytes == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("rounds_inputs", [False, True], ids=["weights", "inputs too"])
def test_weights_of_eight_bits_stay_near(
    rounds_inputs: bool, golden: Any, reference: Any, run: Any, models: Any
) -> None:
    """`quantization: fp8` quantizes the projections of the language model's blocks, and no other layers."""
    policy = models(reference.folder, torch.bfloat16).get_submodule(reference.spec.node("LLM"))
    before = dict(policy.expert.named_parameters())
    report = quantize(policy, "fp8", rounds_inputs=rounds_inputs, kept=policy.unquantized)
    assert {kind.layers for kind in report.kinds.values()} == {golden.config["language"]["layers"]}
    assert dict(policy.expert.named_parameters()).keys() == before.keys()
    small = type(run)(golden, reference, policy)
    small.features = lambda *items: [feature.bfloat16() for feature in run.features(*items)]
    small.prefill(*ITEMS)
    actions, expected = torch.stack(small.flow(*ITEMS)), golden.expected["actions"]
    assert 1e-3 < float((actions - expected).norm() / expected.norm()) < 0.1
