"""Loop outputs for the host are copied within their step, and requests that wait meanwhile share the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.nodes import Attend
from tests.engine.recorded import RecordingCache
from tests.engine.test_kv_candidates import context, near, roll
from tests.engine.test_kv_iterations_ahead import Taught
from tests.engine.test_passes_ahead import STEPS, alone, begin, ready
from tests.engine.test_passes_loops import FLOWING, READ, captured, flow, flows
from tests.engine.tiny_engine import WIDTH, Driver, TinyLM, make_engine, prompt
from tests.engine.tiny_world import TinyWorld, make_world, numbers


class Acting(TinyLM):
    host_outputs = ("velocity",)


@dataclass
class Copy:
    """A copy that is done when `there` is set. `wait` requires it: the engine never waits for a busy device."""

    value: Tensor
    there: bool = False
    waited: bool = False

    @property
    def pending(self) -> Tensor:
        return self.value.clone()

    @property
    def is_done(self) -> bool:
        return self.there

    def wait(self) -> Tensor:
        self.waited = True
        return self.value


@dataclass
class Device:
    """Starts copies to the host. copies: all of them, in order. is_quick: they are done at once."""

    copies: list[Copy] = field(default_factory=list)
    is_quick: bool = False

    def __call__(self, value: Tensor) -> Copy:
        self.copies.append(Copy(value, there=self.is_quick))
        return self.copies[-1]

    @property
    def rows(self) -> int:
        return sum(len(copy.value) for copy in self.copies)


def engine_on(device: Device, **changes: Any) -> KVCacheEngine:
    return make_engine(
        **(
            {
                "spec": FLOWING,
                "module": Acting(),
                "vocab": 0,
                "lookahead": 1,
                "token_budget": 512,
                "to_host": device,
                "graphs": (1,),
                "captures": RecordingCache(),
            }
            | changes
        )
    )


def test_only_named_outputs_are_copied_and_a_step_is_done_with_its_copies() -> None:
    device = Device()
    engine = engine_on(device)
    driver = Driver(engine, lookahead=1)
    key = flow(driver, 0)
    prefix = engine.launch()
    assert prefix is not None and engine.is_done(prefix) and not device.copies, "a prefix leaves nothing to be read"
    engine.collect(prefix)
    running = engine.launch()
    assert running is not None and len(device.copies) == 1, "five iterations, and the last one travels"
    assert not engine.is_done(running)
    device.copies[0].there = True
    assert engine.is_done(running)
    (done,) = engine.collect(running).done
    assert int(done.job.key) == key and device.copies[0].waited
    assert torch.equal(done.outputs["velocity"], device.copies[0].value[0]), "what the job asked for"
    # Carried values stay on the device.
    last_values = engine._scheduler._requests.requests[Handle(0)].last_values
    assert "velocity" not in last_values or done.outputs["velocity"].is_cpu


def test_a_module_without_host_outputs_copies_nothing() -> None:
    device = Device()
    flows(engine_on(device, module=TinyLM()), [0, 1], lookahead=1)
    assert not device.copies


def test_requests_that_arrive_during_a_flow_share_the_next_one() -> None:
    """They arrive one by one; without a limit on steps in flight each would get a replay of its own."""
    device, captures, late = Device(), RecordingCache(), 7
    engine = engine_on(device, captures=captures, max_seq_len=64)
    flows(engine, [0], lookahead=1)
    captured(engine)
    ready = device.rows
    flying: list[Any] = []

    def turn() -> None:
        """Launch what can be launched and collect what is done, oldest first, as the worker does."""
        launched = engine.launch()
        flying.extend([launched] if launched is not None else [])
        while flying and engine.is_done(flying[0]) and not (len(flying) == 1 and launched is flying[0]):
            engine.collect(flying.pop(0))

    driver = Driver(engine, lookahead=1)
    flow(driver, 1)
    for _ in range(4):
        turn()
    assert device.rows == ready + 1, "the first one flows"
    for handle in range(2, 2 + late):
        flow(driver, handle)
        turn()
        turn()
    assert device.rows == ready + 1, "no other flow starts before the copy is done"
    for _ in range(6):
        for copy in device.copies:
            copy.there = True
        turn()
        turn()
    assert device.rows == ready + 1 + late and not flying
    replays = sum(graph.replays for graph in captures.graphs)
    # The second one's prefix was launched behind the first flow; all others share replays of at most four rows.
    assert replays == 2 + -(-(late - 1) // 4)


def test_outputs_of_one_replay_share_one_copy() -> None:
    device = Device(is_quick=True)
    engine = engine_on(device)
    flows(engine, [0], lookahead=1)
    captured(engine)
    found: dict[int, Tensor] = {}
    for handles in ([0, 1, 2, 3], [0], [1], [2], [3]):
        device.copies.clear()
        given = flows(engine, handles, lookahead=1, port="velocity")
        assert len(device.copies) == 1 and device.rows == len(handles)
        for handle, value in given.items():
            near(value, found.setdefault(handle, value))


def test_values_of_emitting_loops_are_copied() -> None:
    device = Device()
    engine = engine_on(device, lookahead=0)
    driver = Driver(engine)
    driver.open(0)
    driver.prefill(0, prompt(0, 5), sample=False, outputs=(), attend=Attend(mask="full"))
    loop = LoopSpec(max_iters=3, carry={"latents_out": "latents"}, fused=True, emit=("velocity",))
    driver.submit(
        0, inputs={"latents": numbers(0, 4, 32)}, outputs=("latents_out",), sample=False, loop=loop, attend=READ
    )
    driver.run()
    assert len(device.copies) == 3 and all(copy.waited for copy in device.copies)


class Telling(TinyWorld):
    streamed_outputs = ("next_frame",)


@pytest.mark.parametrize("candidates", [1, 3])
def test_streamed_outputs_are_copied_for_emitted_iterations_only(candidates: int) -> None:
    """Frames of a rollout are streamed to the client; the last one may be another node's input."""
    device, actions = Device(is_quick=True), numbers(3, candidates, 4, WIDTH)
    found = []
    for module in (TinyWorld(), Telling()):
        driver = Driver(make_world(module=module, lookahead=1, to_host=device), lookahead=1)
        driver.open(0, max_tokens=12)
        context(driver, 0)
        key = roll(driver, 0, actions, 4, emit=("next_frame",))
        driver.run()
        told = torch.stack([item.outputs["next_frame"] for item in driver.emissions[key]])
        found.append((told, driver.done[key].outputs["next_frame"]))
    assert device.rows == 4 * candidates, "each candidate's frame of each step, and no last one again"
    near(found[1][0], found[0][0])
    near(found[1][1], found[0][1])


class TellingTaught(Taught):
    streamed_outputs = ("next_frame",)


def test_iterations_of_one_replay_share_one_copy() -> None:
    device = Device(is_quick=True)
    engine, _ = ready(lookahead=1, module=TellingTaught, to_host=device)
    device.copies.clear()
    driver = Driver(engine, lookahead=1)
    key = begin(driver, 3, 1, STEPS, emit=("next_frame",))
    driver.run()
    for item, expected in zip(driver.emissions[key], alone(3, 1, STEPS), strict=True):
        near(item.outputs["next_frame"], expected)
    assert device.rows == STEPS and len(device.copies) < STEPS / 2
