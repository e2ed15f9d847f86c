"""The stateless engine: batches by shape, urgency, isolation, loops, and noise that ignores the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.base import Done, Failed, Handle, Job, JobKey, LoopSpec, StepResult
from mstar_core.engine.module import node_module
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.stateless.inputs import SMALL, BatchPorts
from mstar_core.graph.declare.nodes import STATELESS, NodeSpec
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import rng

SPEC = NodeSpec(name="codec", engine=STATELESS, ports={"x": "f32[n]", "y": "f32[n]"})


class Doubler(nn.Module):
    """Computes y = 2 x + step and records the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, step: Tensor | None = None) -> dict[str, Tensor]:
        self.batches.append(tuple(x.shape))
        return {"y": 2 * x + (0 if step is None else step[:, None]), "ends": x.sum(-1) > 100}


class Noisy(nn.Module):
    """Adds noise that depends only on the request and its count of runs."""

    def forward(self, x: Tensor, *, seeds: Tensor, counters: Tensor) -> dict[str, Tensor]:
        return {"y": x + rng.normal(seeds, counters, x.shape[1])}


class Player:
    """Plays the worker for one stateless engine."""

    def __init__(self, module: nn.Module, spec: NodeSpec = SPEC, **changes: object) -> None:
        self.engine = StatelessEngine(spec, module, device=torch.device("cpu"), dtype=torch.float32, **changes)  # type: ignore[arg-type]
        self.results: list[StepResult] = []
        self.keys = 0

    def submit(self, handle: int, x: Tensor | None, **fields: object) -> int:
        self.keys += 1
        inputs = {} if x is None else {"x": x}
        inputs.update(fields.pop("more", {}))  # type: ignore[call-overload]
        self.engine.submit(Job(key=JobKey(self.keys), handle=Handle(handle), inputs=inputs, outputs=("y",), **fields))  # type: ignore[arg-type]
        return self.keys

    def run(self) -> Player:
        while (running := self.engine.launch()) is not None:
            self.results.append(self.engine.collect(running))
        return self

    @property
    def done(self) -> dict[int, Done]:
        return {int(done.job.key): done for result in self.results for done in result.done}

    @property
    def failed(self) -> dict[int, Failed]:
        return {int(failed.job.key): failed for result in self.results for failed in result.failed}


def player(module: nn.Module | None = None, handles: int = 4, **changes: object) -> Player:
    made = Player(module or Doubler(), **changes)  # type: ignore[arg-type]
    for handle in range(handles):
        made.engine.open(Handle(handle), SamplingParams(seed=handle), 0)
    return made


def test_equal_shapes_run_together_and_others_apart() -> None:
    module = Doubler()
    play = player(module)
    for handle, length in enumerate([3, 5, 3, 5]):
        play.submit(handle, torch.full((length,), float(handle)))
    play.run()
    assert sorted(module.batches) == [(2, 3), (2, 5)]
    assert all(
        torch.equal(play.done[key].outputs["y"], torch.full((n,), 2.0 * (key - 1)))
        for key, n in [(1, 3), (2, 5), (3, 3), (4, 5)]
    )


def test_a_batch_is_bounded_and_the_most_urgent_goes_first() -> None:
    play = player(max_batch=2)
    for handle, urgency in enumerate([0.0, 5.0, 1.0, 9.0]):
        play.submit(handle, torch.zeros(3), urgency=urgency)
    play.run()
    assert [[int(done.job.key) for done in result.done] for result in play.results] == [[4, 2], [3, 1]]


def test_a_module_bounds_the_values_of_a_batch_but_one_job_may_have_more() -> None:
    class Few(Doubler):
        most_values = 7

    module = Few()
    play = player(module)
    for handle, length in enumerate([3, 3, 3, 9]):
        play.submit(handle, torch.ones(length))
    play.run()
    assert sorted(module.batches) == [(1, 3), (1, 9), (2, 3)] and sorted(play.done) == [1, 2, 3, 4]


def test_jobs_of_one_request_keep_their_order() -> None:
    module = Doubler()
    play = player(module)
    play.submit(0, torch.zeros(3))
    play.submit(0, torch.zeros(4), urgency=9.0)
    play.submit(0, torch.zeros(3))
    play.run()
    assert module.batches == [(1, 3), (1, 4), (1, 3)]


def test_one_bad_item_fails_alone() -> None:
    def fault(handles: list[Handle]) -> None:
        if 2 in handles:
            raise ValueError("broken input")

    play = player(faults=fault)
    for handle in range(4):
        play.submit(handle, torch.ones(3))
    play.submit(2, torch.ones(3))
    play.run()
    assert sorted(play.done) == [1, 2, 4] and list(play.failed) == [3]
    assert "broken input" in str(play.failed[3].error)


@pytest.mark.parametrize("fused", [True, False])
def test_a_loop_carries_counts_and_emits(fused: bool) -> None:
    play = player()
    spec = LoopSpec(max_iters=3, carry={"y": "x"}, fused=fused, emit=("y",))
    key, other = play.submit(0, torch.ones(2), loop=spec), play.submit(0, torch.zeros(2))
    play.run()
    # ((1 * 2 + 0) * 2 + 1) * 2 + 2
    assert play.done[key].outputs["y"].tolist() == [12.0, 12.0]
    assert (play.done[key].reason, play.done[key].iterations) == ("length", 3)
    emitted = [item for result in play.results for item in result.emissions]
    assert [(item.iteration, item.outputs["y"][0].item()) for item in emitted] == [(0, 2.0), (1, 5.0), (2, 12.0)]
    assert play.done[other].outputs["y"].tolist() == [0.0, 0.0]
    assert len(play.results) == 4, "an emitted iteration ends a step, so that it is reported in time"


def test_a_fused_loop_without_emissions_runs_within_one_step() -> None:
    play = player()
    spec = LoopSpec(max_iters=3, carry={"y": "x"}, fused=True)
    keys = [play.submit(0, torch.ones(2), loop=spec), play.submit(1, torch.ones(2), loop=replace(spec, max_iters=2))]
    play.run()
    assert [play.done[key].outputs["y"].tolist() for key in keys] == [[12.0, 12.0], [5.0, 5.0]]
    assert len(play.results) == 1


def test_loops_whose_values_change_shape_leave_and_rejoin_a_batch() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[tuple[int, ...]] = []

        def forward(self, x: Tensor, step: Tensor) -> dict[str, Tensor | list[Tensor]]:
            self.batches.append(tuple(x.shape))
            return {"y": [torch.cat([row, row[:1] + 1]) if row[0] > 0 else row for row in x]}

    module = Growing()
    play = player(module)
    spec = LoopSpec(max_iters=3, carry={"y": "x"}, fused=True)
    keys = [play.submit(handle, torch.full((2,), float(handle % 2)), loop=spec) for handle in range(4)]
    play.run()
    assert [play.done[key].outputs["y"].tolist() for key in keys[:2]] == [[0, 0], [1, 1, 2, 2, 2]]
    assert module.batches == [(4, 2), (2, 3), (2, 4), (2, 2), (2, 2)]


def test_a_loop_ends_at_its_stop_port_and_starts_from_the_last_value() -> None:
    play = player()
    play.submit(0, torch.full((2,), 3.0))
    key = play.submit(0, None, loop=LoopSpec(max_iters=50, carry={"y": "x"}, stop_port="ends"))
    play.run()
    assert play.done[key].reason == "stop" and 3 < play.done[key].iterations < 10


def test_a_loop_of_no_iterations_returns_its_start() -> None:
    play = player()
    key = play.submit(0, torch.full((2,), 3.0), loop=LoopSpec(max_iters=0, carry={"y": "x"}))
    play.run()
    assert play.done[key].outputs["y"].tolist() == [3.0, 3.0] and play.done[key].iterations == 0


def test_noise_depends_only_on_the_request_and_its_count() -> None:
    def noise(handles: list[int], of: int) -> list[Tensor]:
        play = player(Noisy())
        keys = [play.submit(handle, torch.zeros(8)) for handle in handles]
        play.run()
        return [play.done[key].outputs["y"] for handle, key in zip(handles, keys, strict=True) if handle == of]

    alone = noise([2, 2], 2)
    mixed = noise([0, 2, 1, 2, 3, 0], 2)
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_numbers_arrive_one_per_item_under_plain_names() -> None:
    class Facts(nn.Module):
        def forward(self, x: Tensor, *, first: Tensor, seed: Tensor) -> dict[str, list[Tensor]]:
            assert first.dtype == torch.bool and first.shape == seed.shape == x.shape[:1]
            return {"y": [x[i] * seed[i] for i in range(len(x))]}

    play = player(Facts())
    for handle in range(3):
        play.submit(handle, torch.ones(2), more={"$first": torch.tensor(True), "$param:seed": torch.tensor(handle)})
    play.run()
    assert [play.done[key].outputs["y"][0].item() for key in (1, 2, 3)] == [0.0, 1.0, 2.0]


def test_several_candidates_of_one_request_share_a_batch() -> None:
    module = Doubler()
    play = player(module)
    play.submit(0, torch.arange(6.0).view(2, 3), rows=2)
    play.submit(1, torch.zeros(3))
    play.run()
    assert module.batches == [(3, 3)] and play.done[1].outputs["y"].tolist() == [[0, 2, 4], [6, 8, 10]]


def test_a_shared_value_is_repeated_beside_values_per_candidate() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, z: Tensor, scale: Tensor) -> dict[str, Tensor]:
            assert x.shape == z.shape and scale.shape == x.shape[:1]
            return {"y": (x + z) * scale[:, None]}

    play = player(Sum(), spec=replace(SPEC, ports={"x": "f32[n]", "z": "f32[n]", "scale": "f32", "y": "f32[n]"}))
    more = {"z": torch.ones(3), "scale": torch.tensor(2.0)}
    play.submit(0, torch.arange(6.0).view(2, 3), rows=2, more=more)
    play.submit(1, torch.zeros(3), more=more)
    play.run()
    assert play.done[1].outputs["y"].tolist() == [[2, 4, 6], [8, 10, 12]]
    assert play.done[2].outputs["y"].tolist() == [2, 2, 2]


def test_a_job_without_values_per_candidate_runs_once() -> None:
    module = Doubler()
    play = player(module)
    play.submit(0, torch.ones(3), rows=400)
    play.run()
    assert module.batches == [(1, 3)] and play.done[1].outputs["y"].tolist() == [2, 2, 2]


def test_candidates_in_a_loop_carry_a_value_each() -> None:
    play = player()
    spec = LoopSpec(max_iters=2, carry={"y": "x"}, fused=True)
    key = play.submit(0, torch.arange(4.0).view(2, 2), rows=2, loop=spec)
    play.run()
    assert play.done[key].outputs["y"].tolist() == [[1, 5], [9, 13]]


def test_a_value_of_the_wrong_candidate_count_is_refused() -> None:
    play = player()
    play.submit(0, torch.zeros(2, 3, 4), rows=3)
    play.run()
    assert "3 candidates, shape [2, 3, 4], 1 dimensions without candidates" in str(play.failed[1].error)


def test_ragged_ports_of_different_shapes_share_a_batch() -> None:
    """Cameras of each request on a first axis, as many as it has."""

    class Cameras(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[object] = []

        def forward(self, x: Tensor | list[Tensor]) -> dict[str, Tensor | list[Tensor]]:
            self.batches.append([len(row) for row in x])
            counts = [len(row) for row in x]
            return {"y": list(torch.cat(list(x)).mul(2).split(counts))}

    module = Cameras()
    play = player(module, spec=replace(SPEC, ports={"x": "f32[c,n]", "y": "f32[c,n]"}, ragged=("x",)))
    for handle, cameras in enumerate([1, 3, 2, 3]):
        play.submit(handle, torch.full((cameras, 4), float(handle)))
    play.run()
    assert module.batches == [[1, 3, 2, 3]]
    assert play.done[2].outputs["y"].tolist() == [[2.0] * 4] * 3


def test_outputs_do_not_keep_the_batch_alive() -> None:
    play = player()
    for handle in range(4):
        play.submit(handle, torch.ones(3))
    play.run()
    assert play.done[1].outputs["y"].untyped_storage().nbytes() == 12


def test_a_step_on_a_cpu_is_done_at_once() -> None:
    play = player()
    play.submit(0, torch.ones(2))
    running = play.engine.launch()
    assert running is not None and play.engine.is_done(running)


def test_a_step_is_done_when_the_device_has_finished_it() -> None:
    class Unfinished:
        def query(self) -> bool:
            return False

    play = player()
    play.submit(0, torch.ones(2))
    running = play.engine.launch()
    assert running is not None
    running.finished = Unfinished()  # type: ignore[assignment]
    assert not play.engine.is_done(running)


class Teller(nn.Module):
    """Records its host inputs, and gives nothing for items without a number."""

    host_ports = ("x", "step", "gain")

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def forward(self, x: np.ndarray, step: np.ndarray, gain: np.ndarray) -> dict[str, list[Tensor | None]]:
        self.told.append((x, step, gain))
        return {"y": [torch.from_numpy(row) if number else None for row, number in zip(x, step, strict=True)]}


def test_numbers_of_host_ports_arrive_as_one_array_each_and_an_item_may_give_nothing() -> None:
    module = Teller()
    play = player(module, spec=replace(SPEC, ports={"x": "f32[n]", "y": "i64[n]"}))
    first = play.submit(0, torch.tensor([1, 2]), numbers={"$step": 3, "$param:gain": 0.5})
    gains = {"$param:gain": torch.tensor(2.0)}
    second = play.submit(1, torch.tensor([5, 6]), more={"$step": torch.tensor(0)} | gains)
    play.run()
    ((x, step, gain),) = module.told
    assert (x.tolist(), step.tolist(), gain.tolist()) == ([[1, 2], [5, 6]], [3, 0], [0.5, 2.0])
    assert [str(each.dtype) for each in (step, gain)] == ["int64", "float64"]
    assert play.done[first].outputs["y"].tolist() == [1, 2]
    assert "y" not in play.done[second].outputs


def test_only_large_inputs_are_uploaded_at_submission() -> None:
    """Entering a stream is expensive, and a codec window has six inputs."""
    node = NodeSpec(name="N", engine=STATELESS, ports={"big": "f32[n]", "few": "f32[n]", "told": "f32[n]", "at": "i64"})
    module = nn.Identity()
    module.host_ports = ("told",)  # type: ignore[assignment]
    ports = BatchPorts(node, node_module(module), torch.device("cpu"), torch.float32)
    given: dict[str, Tensor | int] = {
        "big": torch.zeros(SMALL + 1),
        "few": torch.zeros(SMALL),
        "told": torch.zeros(SMALL + 1),
        "at": 3,
    }
    assert [name for name, value in given.items() if ports.is_sent(name, value)] == ["big"]


def test_host_ports_of_different_shapes_come_as_a_list() -> None:
    class Lengths(nn.Module):
        host_ports = ("x",)

        def forward(self, x: list[np.ndarray]) -> dict[str, list[Tensor]]:
            assert [type(each) for each in x] == [np.ndarray] * 3
            return {"y": [torch.full((len(each),), len(x)) for each in x]}

    play = player(Lengths(), spec=replace(SPEC, ports={"x": "f32[n]", "y": "i64[n]"}, ragged=("x",)))
    for handle, length in enumerate((2, 5, 2)):
        play.submit(handle, torch.zeros(length))
    play.run()
    assert [play.done[key].outputs["y"].tolist() for key in (1, 2, 3)] == [[3] * 2, [3] * 5, [3] * 2]


def test_numbers_of_other_ports_arrive_as_tensors() -> None:
    play = player()
    key = play.submit(0, torch.ones(2), numbers={"$step": 4})
    play.run()
    assert play.done[key].outputs["y"].tolist() == [6.0, 6.0]


def test_background_work_is_forwarded_to_the_module() -> None:
    left = [2]

    class Busy(Doubler):
        def idle(self) -> bool:
            left[0] -= 1
            return left[0] > 0

    play = player(Busy())
    assert [play.engine.idle(), play.engine.idle(), player().engine.idle()] == [True, False, False]


@pytest.mark.parametrize("when", ["queued", "running"])
def test_closing_drops_everything(when: str) -> None:
    play = player()
    play.submit(0, torch.ones(3))
    play.submit(1, torch.ones(3))
    running = play.engine.launch() if when == "running" else None
    play.engine.close(Handle(0))
    play.engine.close(Handle(0))
    if running is not None:
        play.results.append(play.engine.collect(running))
    play.run()
    assert list(play.done) == [2] and not play.failed
    play.submit(0, torch.ones(3))
    assert play.engine.launch() is None and play.engine.pressure().ready == 0


def test_a_wrong_output_is_an_error_of_the_node() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": torch.zeros(7)}

    play = player(Wrong())
    play.submit(0, torch.ones(3))
    play.run()
    assert "7 of 1 batch items" in str(play.failed[1].error)


def test_few_jobs_are_delayed_briefly_while_playback_is_buffered() -> None:
    """A step is not delayed if one in four requests is ready, a buffer runs low, or a job has waited too long."""
    now = [10.0]
    play = player(handles=16, clock=lambda: now[0])
    for handle in range(3):
        play.submit(handle, torch.ones(3), urgency=-1.0)
    assert play.engine.pressure().is_patient
    now[0] += 0.03
    assert not play.engine.pressure().is_patient
    play.run()
    play.submit(3, torch.ones(3), urgency=-1.0)
    assert play.engine.pressure().is_patient
    play.submit(4, torch.ones(3), urgency=-0.05)
    assert not play.engine.pressure().is_patient
    play.run()
    for handle in range(4):
        play.submit(handle, torch.ones(3), urgency=-1.0)
    assert not play.engine.pressure().is_patient
    alone = player(handles=2)
    alone.submit(0, torch.ones(3), urgency=-1.0)
    assert not alone.engine.pressure().is_patient


class Listing(nn.Module):
    """Takes a list of items."""

    listed_ports = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Tensor]] = []

    def forward(self, x: list[Tensor]) -> dict[str, list[Tensor]]:
        self.seen.append(x)
        return {"y": [row + 1 for row in x]}


def test_a_listed_port_is_a_list_of_items_and_is_not_copied() -> None:
    module, given = Listing(), [torch.ones(3), torch.zeros(3)]
    made = player(module)
    keys = [made.submit(number, value) for number, value in enumerate(given)]
    made.run()
    assert [row.data_ptr() for row in module.seen[0]] == [value.data_ptr() for value in given]
    assert [made.done[key].outputs["y"].tolist() for key in keys] == [[2.0] * 3, [1.0] * 3]


def test_a_single_item_is_not_copied() -> None:
    seen: list[int] = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            seen.append(x.data_ptr())
            return {"y": 2 * x}

    made, value = player(Watching()), torch.ones(3)
    key = made.submit(0, value)
    made.run()
    assert seen == [value.data_ptr()] and made.done[key].outputs["y"].tolist() == [2.0] * 3


class HostSeeds(nn.Module):
    """Returns its seeds, which it takes on the host."""

    host_ports = ("seeds",)

    def forward(self, x: Tensor, *, seeds: np.ndarray) -> dict[str, Tensor]:
        assert isinstance(seeds, np.ndarray) and seeds.dtype == np.int64
        return {"y": torch.from_numpy(seeds)[:, None] + x}


def test_seeds_may_stay_on_the_host() -> None:
    play = player(HostSeeds())
    keys = [play.submit(handle, torch.zeros(1)) for handle in (0, 2)]
    play.run()
    plain = player(Noisy())
    assert [play.done[key].outputs["y"].tolist() for key in keys] == [
        [plain.engine._requests[Handle(handle)].seed] for handle in (0, 2)
    ]
