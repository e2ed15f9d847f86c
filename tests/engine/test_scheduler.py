"""Plans of a KV node's scheduler, read as a test may read them; however a request is planned, its ids are the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import mstar_core
from mstar_core.engine.base import CacheState, Export, Handle, JobKey, LoopSpec
from mstar_core.engine.steps.device import StepLimits
from mstar_core.engine.steps.plan import StepPlan
from mstar_core.engine.steps.updates import (
    PagesCleared,
    PagesCopied,
    PagesDropped,
    PagesRestored,
    PagesSaved,
    SlotChanges,
    SlotCopied,
)
from mstar_core.graph.compile.resident import LoopPorts
from mstar_core.graph.declare.nodes import STEP, Attend
from tests.engine.fake_device import VOCAB, FakeNode, alone

READS = Attend(mask="full", write=False, positions="shared")
APPENDS = Attend(mask="full", tokens=2)


def kinds(plan: StepPlan) -> list[type]:
    return [type(update) for update in plan.updates]


def rollout(steps: int, *, emit: bool = False, keep: bool = False) -> dict[str, object]:
    loop = LoopSpec(max_iters=steps, carry={"x_out": "x"}, fused=True, emit=("x_out",) if emit else ())
    attend = Attend(mask="full", tokens=2, keep="request" if keep else "loop")
    return {"loop": loop, "attend": attend, "inputs": {"x": torch.ones(2)}, "outputs": ("x_out",), "sample": False}


def test_a_prompt_is_cut_to_the_budget_and_draws_from_its_last_part() -> None:
    node = FakeNode(budget=4)
    node.open(0)
    first = node.prefill(0, range(10))
    parts = []
    while first not in node.done:
        ((one,),) = (plan.passes for plan in node.launch())
        parts.append((one.cached, one.count, one.position, one.is_whole, one.sampling is not None))
        assert one.ports["tokens"].tolist() == list(range(10))[one.cached : one.cached + one.count]
        node.collect()
    assert parts == [(0, 4, 0, False, False), (4, 4, 4, False, False), (8, 2, 8, False, True)]


def test_a_decode_batch_is_one_object_until_a_sequence_leaves() -> None:
    node = FakeNode()
    for handle, steps in ((0, 3), (1, 5)):
        node.open(handle)
        node.prefill(handle, [1, 2, 3])
        node.decode(handle, steps)
    node.launch()
    node.collect()
    decodes = []
    while plans := node.launch():
        assert plans[0].decode is not None and not plans[0].passes
        decodes.append(plans[0].decode)
        node.collect()
    batches = [decode.batch for decode in decodes]
    assert [len(batch.slots) for batch in batches] == [2, 2, 2, 1, 1]
    assert batches[0] is batches[2] and batches[3] is batches[4] and batches[0].version < batches[3].version
    assert [decode.lengths.tolist() for decode in decodes] == [[3, 3], [4, 4], [5, 5], [6], [7]]
    assert [decode.drawn.tolist() for decode in decodes] == [[1, 1], [2, 2], [3, 3], [4], [5]]
    assert all((decode.positions == decode.lengths).all() for decode in decodes)


def test_planning_advances_the_counts_and_a_failure_ends_one_request() -> None:
    node = FakeNode()
    for handle in range(3):
        node.open(handle)
        node.prefill(handle, [handle, 2, 3])
    loops = [node.decode(handle, 6) for handle in range(3)]
    node.launch()
    node.collect()
    step = node.scheduler.plan()
    assert step is not None and step.plan is not None and step.plan.decode is not None
    slots = step.plan.decode.batch.slots
    assert (node.memory.tables.length[slots] == step.plan.decode.lengths + 1).all()
    assert (node.memory.slots.left[slots] == 5).all()
    node.device.fails = {int(slots[1])}
    assert node.scheduler.settle(step, node.device.launch(step.plan)) is None
    node.running.append(step)
    node.run()
    assert sorted(node.failed) == [loops[1]]
    for handle in (0, 2):
        assert node.ids[loops[handle]] == alone([handle, 2, 3], 6)[1:]
    assert node.memory.tables.count[slots[1]] == 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("pages", [6, 9, 64])
def test_preemption_changes_no_id(pages: int, lookahead: int) -> None:
    node = FakeNode(pages=pages, lookahead=lookahead, budget=6)
    prompts = [[5 * handle + item for item in range(7)] for handle in range(4)]
    work = []
    for handle, prompt in enumerate(prompts):
        node.open(handle, 24)
        work.append((node.prefill(handle, prompt), node.decode(handle, 12)))
    node.run()
    assert not node.failed and (node.memory.preempted > 0) == (pages < 64)
    for (first, loop), prompt in zip(work, prompts, strict=True):
        assert [int(node.done[first].outputs["token"]), *node.ids[loop]] == alone(prompt, 12)
    for handle in range(4):
        node.scheduler.close(Handle(handle))
    assert node.memory.use().pages_used == 0 and node.memory.use().slots_used == 0
    updates = [update for plan in node.device.plans for update in plan.updates]
    assert any(isinstance(update, PagesCleared) for update in updates) == (pages < 64)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_stop_id_ends_a_loop_and_what_ran_ahead_does_not_count(lookahead: int) -> None:
    plain = alone([1, 2, 3], 12)
    node = FakeNode(lookahead=lookahead)
    node.open(0)
    node.prefill(0, [1, 2, 3])
    loop = node.decode(0, 12, stop=(plain[6],))
    again = node.decode(0, 3)
    node.run()
    assert node.done[loop].reason == "stop" and node.ids[loop] == plain[1 : plain.index(plain[6]) + 1]
    assert node.ids[again] == plain[len(node.ids[loop]) + 1 :][:3]


def test_a_prefix_is_adopted_and_only_the_rest_runs() -> None:
    node = FakeNode()
    for handle in range(2):
        node.open(handle)
    node.prefill(0, range(10), tokens_hash_seed=b"")
    node.run()
    second = node.prefill(1, [*range(9), 70, 71], tokens_hash_seed=b"")
    ((one,),) = (plan.passes for plan in node.launch())
    assert (one.cached, one.count, one.position) == (8, 3, 8)
    node.collect()
    assert node.done[second].cached_tokens == 8
    assert int(node.done[second].outputs["token"]) == alone([*range(9), 70, 71], 1)[0]


def test_a_fork_copies_its_last_page_before_it_writes() -> None:
    node = FakeNode()
    node.open(0)
    node.prefill(0, [1, 2, 3, 4, 5])
    node.run()
    node.scheduler.fork(Handle(0), "main", "side")
    loop = node.decode(0, 4, branch="side")
    node.run()
    first = node.device.plans[1]
    assert SlotCopied in kinds(first) and PagesCopied in kinds(first)
    assert kinds(first).index(SlotCopied) < kinds(first).index(PagesCopied)
    assert node.ids[loop] == alone([1, 2, 3, 4, 5], 4)[1:]
    main = node.decode(0, 4)
    node.run()
    assert node.ids[main] == node.ids[loop]


def test_candidates_share_their_parents_pages_and_run_as_passes_of_one_plan() -> None:
    node = FakeNode()
    node.open(0, candidates=3)
    node.prefill(0, [1, 2, 3, 4, 5])
    node.run()
    inputs = {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])}
    job = node.submit(0, rows=3, **(rollout(3) | {"inputs": inputs}))
    plans = node.launch()
    assert [[one.cached for one in plan.passes] for plan in plans] == [[5] * 3, [7] * 3, [9] * 3]
    assert len({one.slot for one in plans[0].passes}) == 3
    assert all(one.loop is not None and one.loop.iteration == 0 for one in plans[0].passes)
    assert kinds(plans[0]).count(PagesCopied) == 3 and not plans[1].updates
    node.collect()
    outputs = node.done[job].outputs["x_out"]
    assert outputs.shape == (3, 2) and torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("emit", [False, True])
def test_iterations_that_a_replay_computed_ahead_need_no_further_plan(emit: bool) -> None:
    outputs, counts, ids = [], [], []
    for ahead in (False, True):
        node = FakeNode(limits=StepLimits(captures_passes=True, appending=8), ahead=ahead)
        node.open(0)
        node.prefill(0, [1, 2, 3])
        node.run()
        job = node.submit(0, **rollout(6, emit=emit, keep=True))
        before = len(node.device.plans)
        node.run()
        assert sum(len(plan.passes) for plan in node.device.plans[before:]) == (2 if ahead else 6)
        outputs.append(node.done[job].outputs["x_out"])
        counts.append((node.done[job].iterations, len(node.emissions.get(job, []))))
        loop = node.decode(0, 3)
        node.run()
        ids.append(node.ids[loop])
    assert torch.equal(outputs[0], outputs[1]) and ids[0] == ids[1] and counts == [(6, 6 if emit else 0)] * 2


def test_a_pass_that_only_reads_leaves_the_counts_as_they_are() -> None:
    node = FakeNode()
    node.open(0)
    node.prefill(0, [1, 2, 3])
    node.run()
    job = node.submit(
        0,
        inputs={"x": torch.ones(2), STEP: torch.tensor(0)},
        attend=Attend(mask="full", write=False, tokens=2),
        outputs=("x_out",),
        sample=False,
    )
    ((one,),) = (plan.passes for plan in node.launch())
    assert (one.cached, one.wants, one.sampling) == (3, frozenset({"x_out"}), None)
    node.collect()
    assert job in node.done and int(node.memory.tables.length[one.slot]) == 3


def test_a_cache_moves_as_updates() -> None:
    source, target = FakeNode(), FakeNode(pages=8)
    for node in (source, target):
        node.open(0, 24)
    source.prefill(0, [4, 5, 6, 7, 8])
    source.run()
    exported = source.submit(0, move=Export())
    source.run()
    state = source.done[exported].cache
    assert isinstance(state, CacheState) and (state.length, state.position, state.drawn) == (5, 5, 1)
    assert not source.scheduler.holds(Handle(0), "main")
    target.submit(0, move=state)
    loop = target.decode(0, 6)
    target.run()
    assert target.ids[loop] == alone([4, 5, 6, 7, 8], 6)[1:]
    restored = [update for update in target.device.updates if isinstance(update, PagesRestored)]
    assert len(restored) == 1 and not target.device.saved, "the copy is dropped once it is written back"


def test_a_loop_with_values_saves_its_pages_when_it_is_preempted() -> None:
    ports = LoopPorts(id_port="token", states=(("x", "x_out"),), feed="item")
    node = FakeNode(pages=8, loop=ports)
    node.open(0, 20)
    node.open(1, 20)
    loops = []
    for handle in range(2):
        node.prefill(handle, [handle, 3, 4, 5])
        spec = LoopSpec(max_iters=14, carry={"token": "token", "x_out": "x"}, stop_port="token", feed="item")
        loops.append(node.submit(handle, loop=spec, inputs={"x": torch.ones(2)}, outputs=("token", "x_out")))
        node.scheduler.feed(JobKey(loops[-1]), [1, 2], False)
    node.run()
    assert node.scheduler.pages_and_waits()[Handle(0)][1] == "waits for input item"
    assert [len(node.ids[loop]) for loop in loops] == [2, 2]
    for loop in loops:
        node.scheduler.feed(JobKey(loop), range(3, 15), True)
    node.run()
    for handle in range(2):
        node.scheduler.close(Handle(handle))
    node.device.apply(node.memory.take_updates())
    updates = [type(update) for update in node.device.updates]
    assert updates.count(PagesSaved) == node.memory.preempted and PagesRestored in updates and PagesDropped in updates
    assert not node.device.saved
    items = np.concatenate([plan.decode.items for plan in node.device.plans if plan.decode is not None])
    assert sorted(items.tolist()) == sorted([*range(1, 15)] * 2)
    assert [len(node.ids[loop]) for loop in loops] == [14, 14]


def test_slots_reach_the_device_before_the_step_that_reads_them() -> None:
    node = FakeNode()
    node.open(0)
    node.prefill(0, [1])
    node.decode(0, 2, stop=(VOCAB, VOCAB + 1))
    node.run()
    changes = [update for plan in node.device.plans for update in plan.updates if isinstance(update, SlotChanges)]
    armed = [change.armed.tolist() for change in changes if change.armed is not None]
    assert len(armed) == 1 and armed[0][0][1:3] == [VOCAB, VOCAB + 1]


STATE = re.compile(r"mstar_core\.engine\.(scheduling|cache\.(memory|slots|page_table|feeds|loop_values))|PrefixCache")
"""Modules and classes of the host state."""


def test_only_the_engine_knows_the_host_state_and_it_writes_nothing_of_it() -> None:
    root = Path(mstar_core.__file__).parent
    owners = [root / "engine" / folder for folder in ("scheduling", "cache")]
    others = [path for path in root.rglob("*.py") if not any(owner in path.parents for owner in owners)]
    assert [str(path.relative_to(root)) for path in others if STATE.search(path.read_text())] == ["engine/kv/engine.py"]
    written = [
        ast.unparse(target)
        for node in ast.walk(ast.parse((root / "engine/kv/engine.py").read_text()))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    assert all("." not in target.removeprefix("self.") and "[" not in target for target in written), written
