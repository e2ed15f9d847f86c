"""Loops of a KV node: resident ones over sampled ids, general ones over tensors, and how both end."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.scheduling.sequence import ForwardPass
from mstar_core.graph.declare.nodes import Attend
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import VOCAB, Driver, make_engine, prompt, reference

IDS = prompt(1, 9)
PLAIN = reference(IDS, 12)


def start(lookahead: int = 0, **changes: object) -> Driver:
    driver = Driver(make_engine(lookahead=lookahead, **changes), lookahead)
    driver.open(0)
    driver.prefill(0, IDS)
    return driver


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_stop_id_ends_the_loop_and_is_reported(lookahead: int) -> None:
    stop = PLAIN[5]
    first = PLAIN[1:].index(stop) + 1
    driver = start(lookahead)
    loop = driver.decode(0, 12, stop=(stop,))
    driver.run()
    assert driver.ids[loop] == PLAIN[1 : first + 1]
    done = driver.done[loop]
    assert (done.reason, done.iterations, int(done.outputs["token"])) == ("stop", first, stop)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.9, repetition_penalty=1.5, seed=8)]
)
def test_after_a_stop_the_branch_goes_on_as_if_nothing_had_run_ahead(lookahead: int, sampling: SamplingParams) -> None:
    """The step launched before the stop was known leaves no id, no length and no penalty behind."""
    whole = reference(IDS, 12, sampling)
    stop = whole[4]
    cut = whole[1:].index(stop) + 1
    driver = Driver(make_engine(lookahead=lookahead), lookahead)
    driver.open(0, sampling)
    driver.prefill(0, IDS)
    first = driver.decode(0, 12, stop=(stop,))
    second = driver.decode(0, 12 - cut, inputs={"token": torch.tensor([stop])})
    driver.run()
    assert driver.ids[first] + driver.ids[second] == whole[1:]


def test_no_iterations_end_at_once() -> None:
    driver = start()
    plain, stopped = driver.decode(0, 0), driver.decode(0, 0, stop=(PLAIN[0],))
    driver.run()
    assert (driver.done[plain].reason, driver.done[plain].iterations) == ("length", 0)
    assert (driver.done[stopped].reason, driver.done[stopped].iterations) == ("stop", 0)
    assert int(driver.done[plain].outputs["token"]) == PLAIN[0] and plain not in driver.ids


def test_the_starting_value_is_tested_too() -> None:
    driver = start()
    loop = driver.decode(0, 12, stop=(PLAIN[0],))
    driver.run()
    assert (driver.done[loop].reason, driver.done[loop].iterations) == ("stop", 0) and loop not in driver.ids


def test_a_given_start_replaces_the_last_id() -> None:
    driver = Driver(make_engine())
    driver.open(0)
    driver.prefill(0, IDS, sample=False)
    loop = driver.decode(0, 5, inputs={"token": torch.tensor([PLAIN[0]])})
    driver.run()
    assert driver.ids[loop] == PLAIN[1:6]


def test_a_loop_without_a_start_fails() -> None:
    driver = Driver(make_engine())
    driver.open(0)
    loop = driver.decode(0, 5)
    driver.run()
    assert "start from" in str(driver.failed[loop].error)


def test_a_resident_loop_emits_its_declared_ports() -> None:
    driver = start()
    spec = LoopSpec(max_iters=4, carry={"token": "token"}, emit=("hidden",))
    loop = driver.submit(0, loop=spec)
    driver.run()
    found = driver.emissions[loop]
    assert [item.iteration for item in found] == [0, 1, 2, 3] and found[0].outputs["hidden"].shape == (1, 32)


def flow(
    driver: Driver, steps: int, latents: torch.Tensor, *, fused: bool = True, write: bool = False, **loop: object
) -> int:
    spec = LoopSpec(max_iters=steps, carry={"latents_out": "latents"}, fused=fused, **loop)  # type: ignore[arg-type]
    return driver.submit(
        0,
        inputs={"latents": latents},
        outputs=("latents_out",),
        sample=False,
        loop=spec,
        attend=Attend(mask="full", positions="shared", write=write),
    )


LATENTS = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))


def flow_by_hand(driver: Driver, steps: int, latents: torch.Tensor) -> torch.Tensor:
    for step in range(steps):
        key = driver.submit(
            0,
            inputs={"latents": latents, "$step": torch.tensor(step)},
            outputs=("latents_out",),
            sample=False,
            attend=Attend(mask="full", positions="shared", write=False),
        )
        driver.run()
        latents = driver.done[key].outputs["latents_out"]
    return latents


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_a_flow_loop_equals_its_single_steps(fused: bool, lookahead: int) -> None:
    driver = start(lookahead)
    driver.run()
    used = driver.engine.memory().pages_used
    expected = flow_by_hand(driver, 4, LATENTS)
    launches = len(driver.results)
    loop = flow(driver, 4, LATENTS, fused=fused)
    driver.run()
    done = driver.done[loop]
    assert torch.allclose(done.outputs["latents_out"], expected, atol=1e-5)
    assert (done.reason, done.iterations) == ("length", 4)
    assert [result.rows for result in driver.results[launches:]] == [1] * (1 if fused else 4), "one row per iteration"
    assert driver.engine.memory().pages_used == used, "a pass that only reads leaves the cache alone"
    loop = driver.decode(0, 5)
    driver.run()
    assert driver.ids[loop] == PLAIN[1:6]


def test_a_flow_loop_of_no_steps_returns_its_start() -> None:
    driver = start()
    loop = flow(driver, 0, LATENTS)
    driver.run()
    assert torch.equal(driver.done[loop].outputs["latents_out"], LATENTS) and driver.done[loop].iterations == 0


def test_a_rollout_emits_each_step_and_appends() -> None:
    driver = start()
    loop = flow(driver, 3, LATENTS, write=True, emit=("velocity",))
    driver.run()
    assert [item.iteration for item in driver.emissions[loop]] == [0, 1, 2]
    assert driver.engine.memory().pages_used == -(-(len(IDS) + 15) // 4)


def test_rollouts_of_several_requests_share_a_batch_and_equal_each_alone() -> None:
    def run(handles: list[int]) -> dict[int, torch.Tensor]:
        driver = Driver(make_engine())
        keys = {}
        for handle in handles:
            driver.open(handle)
            spec = LoopSpec(max_iters=2 + handle, carry={"latents_out": "latents"}, fused=True)
            keys[handle] = driver.submit(
                handle,
                inputs={"latents": LATENTS * (1 + handle)},
                outputs=("latents_out",),
                sample=False,
                loop=spec,
                attend=Attend(mask="full", positions="running"),
            )
        driver.run()
        return {handle: driver.done[key].outputs["latents_out"] for handle, key in keys.items()}

    together = run([0, 1, 2])
    for handle in range(3):
        assert torch.allclose(together[handle], run([handle])[handle], atol=1e-5)


def test_tokens_kept_for_a_loop_are_dropped_at_its_end() -> None:
    driver = start()
    driver.run()
    spec = LoopSpec(max_iters=3, carry={"latents_out": "latents"}, fused=True)
    driver.submit(0, inputs={"latents": LATENTS}, loop=spec, sample=False, attend=Attend(mask="full", keep="loop"))
    driver.run()
    assert driver.engine.memory().pages_used == 3
    loop = driver.decode(0, 6)
    driver.run()
    assert driver.ids[loop] == PLAIN[1:7]


@pytest.mark.parametrize("keep", ["loop", "request"])
def test_nothing_is_ready_after_a_general_loop_has_ended(keep: Literal["loop", "request"]) -> None:
    driver = start()
    driver.run()
    spec = LoopSpec(max_iters=3, carry={"latents_out": "latents"}, fused=True)
    key = driver.submit(0, inputs={"latents": LATENTS}, loop=spec, sample=False, attend=Attend(mask="full", keep=keep))
    while key not in driver.done:
        driver.turn()
    assert driver.engine.pressure().ready == 0


def test_tokens_of_single_passes_in_a_loop_are_dropped_by_the_next_lasting_job() -> None:
    driver = start()
    for _ in range(3):
        driver.prefill(0, [3, 4], sample=False, attend=Attend(keep="loop"))
    loop = driver.decode(0, 6, inputs={"token": torch.tensor([PLAIN[0]])})
    driver.run()
    assert driver.ids[loop] == PLAIN[1:7]


def test_a_preempted_request_with_embeddings_equals_an_uninterrupted_one() -> None:
    def run(pages: int) -> tuple[list[list[int]], int]:
        driver = Driver(make_engine(num_pages=pages))
        loops = []
        for handle in range(3):
            driver.open(handle, max_tokens=44)
            driver.prefill(handle, prompt(handle, 4), sample=False)
            image = Attend(mask="full", positions="shared")
            driver.submit(handle, inputs={"embeds": LATENTS * 3}, outputs=("token",), attend=image)
            loops.append(driver.decode(handle, 25))
        driver.run()
        assert not driver.failed
        return [driver.ids[loop] for loop in loops], driver.engine.memory().preempted

    calm, none = run(64)
    pressed, some = run(14)
    assert pressed == calm and none == 0 and some > 0


def test_given_positions_advance_the_branch() -> None:
    driver, plain = Driver(make_engine()), Driver(make_engine())
    for each, extra in ((driver, {"positions": torch.arange(9)}), (plain, {})):
        each.open(0)
        attend = Attend(positions="given") if extra else Attend()
        each.submit(0, inputs={"tokens": torch.tensor(IDS), **extra}, outputs=("token",), attend=attend)
        each.decode(0, 6)
        each.run()
    assert driver.ids == plain.ids


def test_a_closed_request_ends_a_loop_that_is_not_fused() -> None:
    driver = start()
    loop = flow(driver, 50, LATENTS, fused=False)
    for _ in range(5):
        driver.turn()
    driver.engine.close(Handle(0))
    driver.run()
    assert loop not in driver.done and driver.engine.memory().pages_used == 0


@pytest.mark.parametrize(("is_stop", "reason"), [(True, "stop"), (False, "length")])
def test_a_loop_without_iterations_reports_a_stop_id_drawn_by_the_prompt(is_stop: bool, reason: str) -> None:
    drawn = reference(prompt(4, 6), 1)[0]
    driver = Driver(make_engine())
    driver.open(0)
    driver.prefill(0, prompt(4, 6))
    key = driver.decode(0, 0, stop=(drawn if is_stop else (drawn + 1) % VOCAB,))
    driver.run()
    assert (driver.done[key].reason, driver.done[key].iterations) == (reason, 0)


def test_chunks_of_one_token_join_those_of_several() -> None:
    forward = ForwardPass(ports={}, axes={}, tokens=3, attend=Attend(), position=0, base=0)
    forward.chunk_outputs["state"] = [torch.zeros(2, 4), torch.ones(4)]
    assert forward.outputs["state"].tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]
