"""Candidates through the whole runtime: distributed over rows, scored together, used in plans, and freed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.check.spec_check import check_spec
from tests.engine.tiny_engine import WIDTH, Driver
from tests.engine.tiny_world import FRAME, PATCHES, TRIAL, WORLD, make_world, numbers
from tests.fakes.world_model import SPEC, Processor, built

CLIP, GOAL = numbers(1, PATCHES, WIDTH), numbers(2, PATCHES, WIDTH)
PAST = numbers(3, 8, WIDTH)


def bench(settings: RuntimeSettings | None = None, ranks: int = 1) -> LocalRuntime:
    made = settings or RuntimeSettings(page_size=PATCHES, max_seq_len=48)
    return LocalRuntime(SPEC, Path(), made, ranks=ranks, built=built(), processor=Processor(None, {}))


def ask(task: str, steps: int = 2, context: int = 0, **arrays: Tensor) -> SampleRequest:
    frames = {f"frame{n}": numbers(20 + n, PATCHES, WIDTH) for n in range(context)}
    given: dict[str, Tensor] = {"clip": CLIP, **({"past": PAST} if context else {}), **frames, **arrays}
    rows = given["noise"].shape[1] if task == "plan" else len(given["actions"])
    if rows == 1:
        given["actions"] = given["actions"][0]
    params: dict[str, Any] = {"task": task, "rows": rows, "steps": steps, "context": context}
    if task == "plan":
        params["rounds"] = len(given["noise"])
    text = json.dumps({name: value.tolist() for name, value in given.items()})
    return SampleRequest(text=text, params=params, outputs=("tensor",))


def alone(actions: Tensor, steps: int, context: int = 0) -> list[Tensor]:
    """Return the frames of one candidate [h, WIDTH] after each step, from single passes of a separate engine."""
    driver = Driver(make_world(num_pages=64))
    driver.open(0, max_tokens=48)
    for n in range(context):
        known = {"frame": numbers(20 + n, PATCHES, WIDTH), "actions": PAST, "$step": torch.tensor(0)}
        driver.submit(0, inputs=known, attend=FRAME, sample=False)
    frame, found = CLIP * 2, []
    for step in range(steps):
        inputs = {"frame": frame, "actions": actions, "$step": torch.tensor(step)}
        key = driver.submit(0, inputs=inputs, attend=FRAME, outputs=("next_frame",), sample=False)
        driver.run()
        frame = driver.done[key].outputs["next_frame"]
        found.append(frame)
    return found


def finals(actions: Tensor, steps: int, context: int = 0) -> Tensor:
    made = torch.stack([alone(each, steps, context)[-1] for each in actions])
    return made if len(actions) > 1 else made[0]


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=2e-6, rtol=1e-5)


def only(outcome: Any, port: str) -> Any:
    assert outcome.status == "finished", outcome.cause
    (value,) = outcome.of(port)
    return value


def test_the_model_is_sound() -> None:
    assert check_spec(SPEC) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("context", [0, 3])
def test_rollouts_of_candidates_equal_each_alone(context: int, ranks: int) -> None:
    made, actions = bench(ranks=ranks), numbers(4, 5, 3, WIDTH)
    outcome = made.ask(ask("rollout", 3, context, actions=actions))[0]
    near(only(outcome, "next_frame"), finals(actions, 3, context))
    assert outcome.counts["rollout_loop"] == 3 and made.leaks() == []


def test_each_step_is_told_in_order_with_all_candidates() -> None:
    made, actions = bench(), numbers(4, 4, 3, WIDTH)
    outcome = made.ask(ask("told", 3, 1, actions=actions))[0]
    steps = outcome.of("next_frame")
    assert [item.meta["step"] for item in outcome.items if item.port == "norm"] == [0, 1, 2]
    for step in range(3):
        near(steps[step], torch.stack([alone(each, 3, 1)[step] for each in actions]))
    assert made.leaks() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_over_several_nodes_scores_each_step(ranks: int) -> None:
    made, actions = bench(ranks=ranks), numbers(4, 4, 3, WIDTH)
    outcome = made.ask(ask("scored", 3, 2, actions=actions, goal=GOAL))[0]
    frames = [torch.stack([alone(each, 3, 2)[step] for each in actions]) for step in range(3)]
    near(np.stack(outcome.of("energies"))[..., 0], torch.stack([(f - GOAL).abs().mean(dim=(1, 2)) for f in frames]))
    near(only(outcome, "next_frame"), frames[-1])
    assert made.leaks() == []


def test_a_walk_frees_the_rows_of_its_loops_though_its_request_goes_on() -> None:
    made = bench()
    call = made.send(ask("looked", 2, 2, actions=numbers(4, 3, 3, WIDTH), goal=GOAL))
    world, used = made.workers[0].runners["world"], []
    while call.outcome is None:
        made.step()
        used.append((len(call.items), world.memory().pages_used))
    before_last = [pages for items, pages in used if items == len(used and call.outcome.items) - 1]
    assert max(pages for _, pages in used) == 2 + 3 * 2 and before_last and before_last[-1] == 2


def test_planning_keeps_its_context_and_frees_each_rollout() -> None:
    rounds, rows, steps = 3, 6, 2
    mean, noise = numbers(5, steps, WIDTH), numbers(6, rounds, rows, steps, WIDTH)
    # Pages of the context and of two candidates only, so that leaked pages of a rollout make the next one fail.
    made = bench(RuntimeSettings(page_size=PATCHES, max_seq_len=18, pages=6))
    outcome = made.ask(ask("plan", steps, 2, mean=mean, noise=noise, goal=GOAL))[0]
    for each in noise:
        candidates = mean[None] + each
        mean = candidates[int((finals(candidates, steps, 2) - GOAL).abs().mean(dim=(1, 2)).argmin())]
    near(only(outcome, "mean"), mean)
    engine = made.workers[0].runners["world"]
    assert engine.memory().preempted == 0 and made.leaks() == []


def test_rows_of_several_requests_share_passes() -> None:
    nodes = built()
    made = LocalRuntime(
        SPEC, Path(), RuntimeSettings(page_size=PATCHES, max_seq_len=48), built=nodes, processor=Processor(None, {})
    )
    asks = [ask("told", 1 + n, n % 2, actions=numbers(30 + n, 2, 4, WIDTH)) for n in range(3)]
    for n, outcome in enumerate(made.ask(*asks)):
        near(outcome.of("next_frame")[-1], finals(numbers(30 + n, 2, 4, WIDTH), 1 + n, n % 2))
    assert max(nodes["world"].module.passes) > 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "rows", "words"),
    [
        ("scored", 7, "holds 6 candidates at once, 7 were requested"),
        ("scored", 6, "can never fit the cache of node world"),
    ],
)
def test_rows_that_never_fit_are_refused_before_anything_runs(task: str, rows: int, words: str) -> None:
    made = bench(RuntimeSettings(page_size=PATCHES, max_seq_len=27, pages=12))
    outcome = made.ask(ask(task, 4, actions=numbers(4, rows, 4, WIDTH), goal=GOAL))[0]
    assert outcome.status == "failed" and outcome.error is not None
    assert words in outcome.cause and outcome.error.status == 413
    assert made.workers[0].steps.collected == 0 and made.leaks() == []


def test_more_candidates_than_rows_take_turns_where_nothing_of_them_stays() -> None:
    made, actions = bench(), numbers(4, 20, 2, WIDTH)
    assert WORLD.kv is not None and WORLD.kv.rows < 20
    near(only(made.ask(ask("rollout", 2, 1, actions=actions))[0], "next_frame"), finals(actions, 2, 1))
    assert made.leaks() == []


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_requests_and_cancels_equals_each_alone(seed: int) -> None:
    trial = random.Random(seed)
    pages = trial.choice([None, 18])
    made = bench(
        RuntimeSettings(page_size=PATCHES, max_seq_len=18, pages=pages, token_budget=trial.choice([9, 30, 2048]))
    )
    calls, plans = {}, {}
    for n in range(7):
        task, rows, steps = trial.choice(["rollout", "told", "scored"]), trial.randint(1, 4), trial.randint(1, 3)
        if rows == 1 and task == "scored":
            task = "told"
        context, actions = trial.randint(0, 2), numbers(40 + n, rows, 3, WIDTH)
        goal = {"goal": GOAL} if task == "scored" else {}
        plans[n] = (actions, steps, context)
        calls[n] = made.send(ask(task, steps, context, actions=actions, **goal))
        for _ in range(trial.randint(0, 4)):
            made.step()
        if trial.random() < 0.25:
            made.cancel(calls[n])
    made.run()
    assert TRIAL.keep == "loop"
    for n, call in calls.items():
        assert call.outcome is not None
        if call.outcome.status == "finished":
            near(call.outcome.of("next_frame")[-1], finals(*plans[n]))
        else:
            assert call.outcome.status == "cancelled", call.outcome.cause
    assert made.leaks() == []
