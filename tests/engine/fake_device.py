"""A KV node without a model: a device that computes plans by arithmetic on the CPU, and a scheduler in front of it.

The next id of a sequence depends on every token in its cache, on its position and on the count of its draws. So a lost
page, a wrong length or a missed copy shows in the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mstar_core.engine.base import Done, Emission, Failed, Handle, Job, JobKey, LoopSpec, StepResult
from mstar_core.engine.cache.loop_values import LoopValues
from mstar_core.engine.cache.memory import KVMemory
from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.cache.prefix_cache import PrefixCache
from mstar_core.engine.cache.slots import Slots
from mstar_core.engine.scheduling.device_share import device_share
from mstar_core.engine.scheduling.inputs import InputProcessor
from mstar_core.engine.scheduling.scheduler import Scheduler
from mstar_core.engine.scheduling.step import KVStep
from mstar_core.engine.steps.device import DecodeOutput, DrawnIds, PassOutput, StepLimits, StepOutput
from mstar_core.engine.steps.plan import DecodeBatch, DecodePlan, PassPlan, StepPlan
from mstar_core.engine.steps.updates import (
    LoopValuesSet,
    PagesArrived,
    PagesCleared,
    PagesCopied,
    PagesDropped,
    PagesRestored,
    PagesSaved,
    PenaltiesRestored,
    SlotChanges,
    SlotCopied,
    Update,
)
from mstar_core.engine.transfers import HostCopy
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.compile.resident import LoopPorts
from mstar_core.graph.declare.nodes import KV_CACHE, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams

VOCAB, PAGE = 101, 4
CPU = torch.device("cpu")
NODE = NodeSpec(
    name="LM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]", "x": "f32[2]", "hidden": "f32[n,1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=1, branches=("main", "side"), rows=4),
    row_ports=("x",),
    sampling=Sampling(port="token"),
)


class FakeModule:
    """Stands for a module: only the keywords of its forward are looked at."""

    def forward(self, kv: object, positions: Tensor, tokens: Tensor, x: Tensor) -> None:
        raise AssertionError("the device computes without it")


class FakeDevice:
    """Implements `steps.device.Device`. plans: those launched, in order. fails: slots whose next forward fails.

    ahead: whether loops that append return the outputs of all iterations that a plan allows.
    """

    def __init__(self, pages: int, slots: int, limits: StepLimits, *, ahead: bool = False) -> None:
        self.limits = limits
        self.ahead = ahead
        self.step_s = 0.0
        self.plans: list[StepPlan] = []
        self.updates: list[Update] = []
        self.fails: set[int] = set()
        self.pool = np.full((pages, PAGE), -1000, dtype=np.int64)  # an unset page must never be read
        self.written = np.zeros((pages, PAGE), dtype=np.bool_)
        self.last = np.zeros(slots, dtype=np.int64)
        self.stops: dict[int, list[int]] = {}
        self.stopped: set[int] = set()
        self.saved: dict[int, np.ndarray] = {}
        self.values: dict[tuple[str, int], Tensor] = {}

    # -- updates and reads -------------------------------------------------------------------------------------------

    def apply(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.updates.append(update)
            match update:
                case SlotChanges():
                    self._set_slots(update)
                case SlotCopied():
                    self.last[update.into] = self.last[update.source]
                case PagesCleared():
                    self.pool[update.pages] = 0
                case PagesCopied():
                    for copy in update.copies:
                        self.pool[copy.target] = self.pool[copy.source]
                case PagesSaved():
                    self.saved[update.number] = self.pool[update.pages].copy()
                case PagesArrived():
                    self.saved[update.number] = update.groups[0].numpy()
                case PagesRestored():
                    self.pool[update.pages] = self.saved[update.number][: len(update.pages)]
                case PagesDropped():
                    for number in update.numbers:
                        del self.saved[number]
                case LoopValuesSet():
                    for slot, value in zip(update.slots.tolist(), update.values, strict=True):
                        self.values[update.port, slot] = value
                case PenaltiesRestored():
                    pass

    def decode_step_s(self, batch: DecodeBatch) -> float:
        return self.step_s

    def attached_rows(self, port: str, pages: Sequence[int], first: int, count: int) -> Tensor:
        raise AssertionError("the node has no attached port")

    def loop_value(self, slot: int, port: str) -> Tensor | None:
        return self.values.get((port, slot))

    def seen(self, slot: int) -> Tensor | None:
        return None

    def gather_pages(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        return (torch.from_numpy(self.pool[list(pages)].copy()),)

    def check_pages(self, groups: Sequence[Tensor], pages: int) -> None:
        if [group.shape[0] for group in groups] != [pages]:
            raise EngineError("a cache does not fit")

    def _set_slots(self, changes: SlotChanges) -> None:
        if changes.moved is not None:
            self.last[changes.moved[0]] = changes.moved[1]
        for slot, *ids in changes.armed.tolist() if changes.armed is not None else ():
            self.stops[slot] = ids
            self.stopped.discard(slot)

    # -- steps -------------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        self.apply(plan.updates)
        failed: dict[int, MstarError] = {}
        decode: list[DecodeOutput] = []
        for number, each in enumerate(plan.decode.each() if plan.decode is not None else ()):
            decode += [replace(part, first=number) for part in self._decode(plan, each, failed)]
            self.stopped |= set(plan.decode.ended_by(number).tolist() if plan.decode is not None else ())
        passes = [self._pass(plan, one, failed) for one in plan.passes]
        return StepOutput(decode=decode, passes=passes, failed=failed)

    def _decode(self, plan: StepPlan, decode: DecodePlan, failed: dict[int, MstarError]) -> list[DecodeOutput]:
        outputs = []
        for index, slot in enumerate(decode.batch.slots.tolist()):
            if slot in self.fails:
                failed[slot] = EngineError("a sequence fails")
                continue
            length = int(decode.lengths[index])
            self._write(plan, slot, length, [int(self.last[slot])])
            item = int(decode.items[index]) if decode.items is not None else 0
            position, drawn = int(decode.positions[index]), int(decode.drawn[index])
            token = (self._draw(plan, slot, length + 1, position, drawn) + item) % VOCAB
            if slot in self.stopped:
                token = int(self.last[slot])
            elif token in self.stops.get(slot, []):
                self.stopped.add(slot)
            self.last[slot] = token
            ids = torch.tensor([token])
            reports = {port: torch.tensor([[float(token)]]) for port in decode.batch.reports}
            taken, given = DrawnIds(ids, HostCopy(ids)), tuple(reports)
            outputs.append(DecodeOutput(start=index, count=1, drawn=taken, reports=reports, given=given))
        return outputs

    def _pass(self, plan: StepPlan, one: PassPlan, failed: dict[int, MstarError]) -> PassOutput | None:
        if one.slot in self.fails:
            failed[one.slot] = EngineError("a sequence fails")
            return None
        cached, later, x = one.cached, list[dict[str, Tensor]](), one.ports.get("x")
        outputs = self._ports(plan, one, cached, x)
        for _ in range(one.loop.ahead - 1 if self.ahead and one.loop is not None else 0):
            cached += one.count
            later.append(self._ports(plan, one, cached, (later[-1] if later else outputs)["x_out"]))
        drawn = None
        if one.sampling is not None:
            position = int(one.position) + one.count - 1
            self.last[one.slot] = self._draw(plan, one.slot, cached + one.count, position, one.drawn)
            ids = torch.from_numpy(self.last[[one.slot]])
            drawn = DrawnIds(ids, HostCopy(ids))
        at = 0 if drawn is not None else -1
        return PassOutput(ports=outputs, later=later, drawn=drawn, index=at, given=tuple(outputs))

    def _ports(self, plan: StepPlan, one: PassPlan, cached: int, x: Tensor | None) -> dict[str, Tensor]:
        if x is not None:
            values = [round(float(x.sum()) * 1000) + token for token in range(one.count)]
        else:
            values = next(iter(one.ports.values())).tolist()
        before = self._read(plan, one.slot, cached)
        if one.attend.write:
            self._write(plan, one.slot, cached, values)
        mix = float((_mixed(np.concatenate([before, values])) % 1009) / 1009)
        outputs = {"x_out": torch.tensor([mix, 0.5]), "hidden": torch.tensor(values, dtype=torch.float32)[:, None]}
        return {port: value for port, value in outputs.items() if port in one.wants}

    def _places(self, plan: StepPlan, slot: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(start, end)
        return plan.tables[slot, at // PAGE], at % PAGE

    def _write(self, plan: StepPlan, slot: int, start: int, values: Sequence[int]) -> None:
        self.pool[self._places(plan, slot, start, start + len(values))] = values

    def _read(self, plan: StepPlan, slot: int, length: int) -> np.ndarray:
        values: np.ndarray = self.pool[self._places(plan, slot, 0, length)]
        assert (values != -1000).all(), "a page is read that was never written"
        return values

    def _draw(self, plan: StepPlan, slot: int, length: int, position: int, drawn: int) -> int:
        return (_mixed(self._read(plan, slot, length)) + 17 * position + 29 * drawn) % VOCAB


def _mixed(values: np.ndarray) -> int:
    return int((values * (np.arange(len(values)) * 7 + 3)).sum())


class FakeNode:
    """A scheduler with a fake device; plays the worker. done, failed, emissions: by key; ids: drawn in decode steps.

    step_s: measured time of a captured decode step, 0.0 without one.
    """

    def __init__(
        self,
        *,
        pages: int = 64,
        slots: int = 16,
        budget: int = 64,
        lookahead: int = 0,
        most_tokens: int = 96,
        limits: StepLimits | None = None,
        ahead: bool = False,
        steps_at_once: int = 1,
        step_s: float = 0.0,
        prefix_cache: bool = True,
        loop: LoopPorts | None = None,
        spec: NodeSpec = NODE,
    ) -> None:
        pool = PagePool(pages, PAGE)
        values = LoopValues(spec, loop, slots, torch.float32, most_tokens + 1) if loop is not None else None
        self.memory = KVMemory(
            pool,
            PageTables(pool, slots, most_tokens),
            Slots(slots, most_tokens, VOCAB),
            PrefixCache(pool) if prefix_cache else None,
            values,
        )
        self.device = FakeDevice(pages, slots, limits or StepLimits(), ahead=ahead)
        self.now = 0.0
        self.device.step_s = step_s
        self.lookahead = lookahead
        module: object = FakeModule()
        self.scheduler = Scheduler(
            spec,
            self.memory,
            InputProcessor(spec, module, CPU, torch.float32),  # type: ignore[arg-type]
            self.device,
            device_share(0.5, CPU, lambda: self.now),
            vocab=VOCAB,
            token_budget=budget,
            lookahead=lookahead,
            steps_at_once=steps_at_once,
            clock=lambda: self.now,
        )
        self.done: dict[int, Done] = {}
        self.failed: dict[int, Failed] = {}
        self.ids: dict[int, list[int]] = {}
        self.emissions: dict[int, list[Emission]] = {}
        self.running: list[KVStep] = []
        self.keys = 0

    def open(self, handle: int, most_tokens: int = 40, candidates: int = 1) -> None:
        self.scheduler.open(Handle(handle), SamplingParams(), most_tokens, candidates)

    def submit(self, handle: int, **fields: object) -> int:
        self.keys += 1
        self.scheduler.submit(Job(key=JobKey(self.keys), handle=Handle(handle), **fields))  # type: ignore[arg-type]
        return self.keys

    def prefill(self, handle: int, ids: Sequence[int], **fields: object) -> int:
        return self.submit(handle, **({"inputs": {"tokens": torch.tensor(ids)}, "outputs": ("token",)} | fields))

    def decode(self, handle: int, steps: int, stop: tuple[int, ...] = (), **fields: object) -> int:
        loop = LoopSpec(max_iters=steps, carry={"token": "token"}, stop_port="token", stop_ids=stop)
        return self.submit(handle, **({"loop": loop, "outputs": ("token",)} | fields))

    def launch(self) -> list[StepPlan]:
        """Launch a step. Returns its plans; nothing is collected."""
        step = self.scheduler.plan()
        before = len(self.device.plans)
        if step is not None:
            plan = step.plan
            while plan is not None:
                plan = self.scheduler.settle(step, self.device.launch(plan))
            self.running.append(step)
        return self.device.plans[before:]

    def collect(self) -> StepResult:
        """Commit the oldest step."""
        result = self.scheduler.commit(self.running.pop(0))
        if result.loop is not None:
            for key, drawn in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                self.ids.setdefault(key, []).append(drawn)
        for emission in result.emissions:
            self.emissions.setdefault(int(emission.job.key), []).append(emission)
        self.failed |= {int(failed.job.key): failed for failed in result.failed}
        self.done |= {int(done.job.key): done for done in result.done}
        return result

    def run(self, limit: int = 2000) -> FakeNode:
        """Launch and collect until nothing is left to do."""
        for _ in range(limit):
            before = len(self.running)
            if self.scheduler.pressure().ready:
                self.launch()
            if len(self.running) > self.lookahead or (self.running and len(self.running) == before):
                self.collect()
            elif not self.running:
                return self
        raise AssertionError(f"still running after {limit} turns")


def alone(ids: Sequence[int], steps: int) -> list[int]:
    """Return the ids that a request draws on its own in a node with plenty of pages."""
    node = FakeNode(prefix_cache=False, budget=1000)
    node.open(0)
    first, loop = node.prefill(0, ids), node.decode(0, steps)
    node.run()
    return [int(node.done[first].outputs["token"]), *node.ids[loop]]
