"""The cross-entropy planner against the official one, and its distances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from mstar_vjepa2.nodes import planning
from mstar_vjepa2.nodes.planning import distance
from mstar_vjepa2.params import COSTS

from .conftest import PLANS, Golden, gap
from .test_ac_predictor import ENERGY, latents, roll

PLAN = 1e-5
MOMENTA = ("momentum_mean", "momentum_std", "momentum_mean_gripper", "momentum_std_gripper")


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_with_the_official_noise(case: str, ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs, expected, params = ac.given, ac.expected, ac.json(f"{case}_params.json")
    steps, limit = params["rollout"], params["maxnorm"]
    fixed = torch.full((1, 4), float("nan"))
    mean, std = torch.zeros(1, steps, 4), torch.tensor([limit, limit, limit, 1.0]).expand(1, steps, 4)
    for axis, value in params.get("axis", {}).items():
        fixed[0, int(axis)] = value
        mean[..., int(axis)] = value
    start, nodes = latents(ac_nodes, ac)[:1], {}
    for step in range(params["cem_steps"]):
        drawn = ac_nodes["cem_sampler"](
            mean=mean,
            std=std,
            noise=inputs[f"{case}_noise"][None],
            fixed_axes=fixed,
            close_from=torch.tensor([[params.get("close_gripper", steps)]]),
            maxnorm=torch.tensor([limit]),
            step=torch.tensor([step]),
        )["candidates"]
        assert gap(drawn[0], expected[f"{case}_candidates"][step]) < PLAN
        frames, _ = roll(ac_nodes["ac_predictor"], start, inputs["roll_state0"][0, 0], drawn[0])
        scored = ac_nodes["mpc_scorer"](
            final=frames[None, :, -1:], goal=inputs["goal_latents"], cost=torch.tensor([COSTS.index("l1")])
        )
        assert gap(scored["energies"][0, :, 0], expected[f"{case}_energies"][step]) < ENERGY
        assert int(scored["best_index"]) == int(expected[f"{case}_energies"][step].argmin())
        nodes = ac_nodes["cem_update"](
            mean=mean,
            std=std,
            candidates=drawn,
            energies=scored["energies"],
            topk=torch.tensor([params["topk"]]),
            **{name: torch.tensor([params[name]]) for name in MOMENTA},
        )
        mean, std = nodes["mean"], nodes["std"]
        assert gap(mean[0], expected[f"{case}_mean"][step]) < PLAN
        assert gap(std[0], expected[f"{case}_std"][step]) < PLAN
    assert gap(nodes["actions"][0], expected[f"{case}_actions"]) < PLAN
    assert gap(nodes["best_energy"][0, 0], expected[f"{case}_energies"][-1].min()) < ENERGY


def test_requests_of_one_batch_keep_their_own_numbers(ac_nodes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 3, 2, 5, 4, generator=generator)
    fixed = torch.tensor([[float("nan")] * 4, [float("nan"), 0.02, float("nan"), float("nan")]])
    mean, std = torch.zeros(2, 2, 4), torch.ones(2, 2, 4)
    both = {
        "mean": mean,
        "std": std,
        "noise": noise,
        "fixed_axes": fixed,
        "close_from": torch.tensor([[9], [1]]),
        "maxnorm": torch.tensor([0.05, 0.1]),
        "step": torch.tensor([2, 0]),
    }
    together = ac_nodes["cem_sampler"](**both)["candidates"]
    for row in range(2):
        alone = ac_nodes["cem_sampler"](**{name: value[row : row + 1] for name, value in both.items()})["candidates"]
        assert torch.equal(together[row : row + 1], alone)
    assert float(together[0, ..., :3].abs().max()) <= 0.05 + 1e-8 and float(together[..., 3:6].abs().max()) == 0
    assert bool((together[1, ..., 1] == 0.02).all()) and bool((together[1, :, 1, 6] == 1).all())
    assert float(together[0, ..., 6].abs().max()) <= 0.75
    counts = {
        "energies": torch.rand(2, 5, 1, generator=generator),
        "topk": torch.tensor([2, 4]),
        "candidates": together,
    }
    momenta = {name: torch.tensor([0.1, 0.3]) for name in MOMENTA}
    moved = ac_nodes["cem_update"](mean=mean, std=std, **counts, **momenta)
    for row, count in enumerate((2, 4)):
        best = counts["energies"][row, :, 0].argsort()[:count]
        chosen = together[row, best][..., [0, 1, 2, 6]]
        share = 0.1 if row == 0 else 0.3
        assert gap(moved["mean"][row], (1 - share) * chosen.mean(0)) < 1e-6
        assert gap(moved["std"][row], (1 - share) * chosen.std(0, unbiased=True) + share) < 1e-6


def test_a_weak_grip_is_no_movement(ac_nodes: dict[str, Any]) -> None:
    candidates = torch.zeros(1, 4, 2, 7)
    candidates[..., 0, 6], candidates[..., 1, 6] = 0.2, -0.3
    zero = torch.zeros(1)
    nodes = ac_nodes["cem_update"](
        mean=torch.zeros(1, 2, 4),
        std=torch.ones(1, 2, 4),
        candidates=candidates,
        energies=torch.rand(1, 4, 1),
        topk=torch.tensor([2]),
        **dict.fromkeys(MOMENTA, zero),
    )
    assert nodes["actions"][0, :, 6].tolist() == pytest.approx([0.0, -0.3])


def test_distances() -> None:
    generator = torch.Generator().manual_seed(2)
    frames, goal = torch.randn(3, 4, 5, generator=generator), torch.randn(4, 5, generator=generator)
    plain = {
        "l1": [(frame - goal).abs().mean() for frame in frames],
        "l2": [((frame - goal) ** 2).mean() for frame in frames],
        "cosine": [1 - cosine_similarity(frame.reshape(1, -1), goal.reshape(1, -1))[0] for frame in frames],
    }
    assert set(plain) == set(COSTS)
    for cost, expected in plain.items():
        assert gap(distance(frames, goal, cost), torch.stack(expected)) < 1e-6
        assert distance(frames.bfloat16(), goal, cost).dtype == torch.float32


def test_one_request_without_candidates_is_scored_too(ac_nodes: dict[str, Any]) -> None:
    frame, goal = torch.rand(1, 1, 4, 5), torch.rand(1, 4, 5)
    nodes = ac_nodes["mpc_scorer"](final=frame, goal=goal, cost=torch.tensor([0]))
    assert nodes["energies"].shape == (1, 1) and nodes["best_index"].tolist() == [[0]]


@pytest.mark.parametrize("cost", COSTS)
def test_many_candidates_are_compared_a_few_at_a_time(
    cost: str, ac_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    frames, goal = torch.randn(400, 1, 4, 5, generator=generator), torch.randn(1, 4, 5, generator=generator)
    expected = distance(frames[:, 0], goal[0], cost)
    seen = []

    def watched(part: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(part))
        return distance(part, *rest)

    monkeypatch.setattr(planning, "distance", watched)
    monkeypatch.setattr(planning, "SLICE_BYTES", 37 * 4 * 5 * 4)
    nodes = ac_nodes["mpc_scorer"](final=[frames], goal=goal, cost=torch.tensor([COSTS.index(cost)]))
    assert torch.equal(nodes["energies"][0][:, 0], expected)
    assert int(nodes["best_index"]) == int(expected.argmin())
    assert max(seen) == 37 and sum(seen) == 400


def test_requests_with_unlike_numbers_of_candidates_are_scored_together(ac_nodes: dict[str, Any]) -> None:
    frames, goal = [torch.rand(3, 1, 4, 5), torch.rand(2, 1, 4, 5)], torch.rand(2, 4, 5)
    nodes = ac_nodes["mpc_scorer"](final=frames, goal=goal, cost=torch.tensor([0, 1]))
    assert [each.shape for each in nodes["energies"]] == [(3, 1), (2, 1)]
    assert nodes["best_index"].shape == (2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("cost", COSTS)
def test_hundreds_of_frames_are_scored_in_the_memory_that_is_kept_for_it(cost: str) -> None:
    frames = torch.randn(400, 1, 256, 1408, device="cuda")
    goal, scorer = torch.randn(1, 256, 1408, device="cuda"), planning.Scorer()
    expected = torch.stack([distance(frame[0], goal[0], cost) for frame in frames])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    actual = scorer(final=[frames], goal=goal, cost=torch.tensor([COSTS.index(cost)]))
    assert torch.cuda.max_memory_allocated() - before <= scorer.working_bytes(0)
    assert gap(actual["energies"][0, :, 0].cpu(), expected.cpu()) < 1e-5
