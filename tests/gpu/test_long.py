"""Ten thousand requests through one engine, most of them cut off somewhere: no error, no page, no memory is left."""

from __future__ import annotations

import random
import resource

import pytest
import torch

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.linear import fuse_projections
from tests.engine.tiny_engine import prompt
from tests.gpu.test_engine import WideLM, wide_engine

pytestmark = pytest.mark.gpu
REQUESTS, WARM, AT_ONCE = 10_000, 5_000, 32
WINDOWS = 2
"""Parts of the requests after the warm-up. A leak grows in each; a kernel first needed late is loaded in one."""

GROWTH_BYTES = 2 << 20
"""Allowed growth of process and device memory in the part with the least."""


class Crowd:
    """Requests that come, and end or are closed at a random moment. Turns the engine as the worker does, one ahead."""

    def __init__(self, engine: KVCacheEngine, seed: int) -> None:
        self.engine = engine
        self.finished = self.closed = self.next = self.keys = 0
        self._chance = random.Random(seed)
        self._open: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        self._flight: list[object] = []

    def run(self, count: int) -> None:
        """`count` more requests, and until all of them are over."""
        end = self.next + count
        while self.next < end or self._open:
            while self.next < end and len(self._open) < AT_ONCE:
                self._come()
            if self._open and self._chance.random() < 0.35:
                self._go(self._chance.choice(list(self._open)))
            self._turn()
        while self._flight:
            self._collect()

    def _come(self) -> None:
        handle, self.next, self.keys = self.next, self.next + 1, self.keys + 2
        sampling = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=handle)
        steps, ids = self._chance.randint(1, 60), torch.tensor(prompt(handle, self._chance.randint(1, 40)))
        self.engine.open(Handle(handle), sampling, len(ids) + steps)
        first = Job(key=JobKey(self.keys), handle=Handle(handle), inputs={"tokens": ids}, outputs=("token",))
        loop = LoopSpec(max_iters=steps, carry={"token": "token"}, stop_port="token")
        self.engine.submit(first)
        self.engine.submit(Job(key=JobKey(self.keys + 1), handle=Handle(handle), loop=loop, outputs=("token",)))
        self._open[handle] = self.keys + 1

    def _go(self, handle: int) -> None:
        del self._open[handle]
        self.engine.close(Handle(handle))
        self.closed += 1

    def _turn(self) -> None:
        launched = self.engine.launch()
        if launched is not None:
            self._flight.append(launched)
        if self._flight and (len(self._flight) > 1 or launched is None):
            self._collect()

    def _collect(self) -> None:
        result = self.engine.collect(self._flight.pop(0))  # type: ignore[arg-type]
        assert not result.failed, result.failed
        for done in result.done:
            handle = int(done.job.handle)
            if self._open.get(handle) == done.job.key:
                self._go(handle)
                self.closed, self.finished = self.closed - 1, self.finished + 1


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "cached"])
def test_nothing_is_left_after_ten_thousand_requests(prefix_cache: bool, cuda: torch.device) -> None:
    module = WideLM().to(cuda, torch.bfloat16)
    fuse_projections(module)
    # Fewer pages than the requests at once would like, so that some are made to give theirs up.
    engine = wide_engine(
        cuda, module, graphs=(1, 8, 32), num_pages=48, max_slots=AT_ONCE, prefix_cache=prefix_cache, token_budget=256
    )
    crowd = Crowd(engine, seed=11)
    crowd.run(WARM)
    torch.cuda.synchronize()
    device, growths = torch.cuda.memory_allocated(), []
    for _ in range(WINDOWS):
        held = resident_bytes()
        crowd.run((REQUESTS - WARM) // WINDOWS)
        torch.cuda.synchronize()
        growths.append(resident_bytes() - held)
    memory, growth = engine.memory(), min(growths)
    print(
        f"finished {crowd.finished}, closed {crowd.closed}, preempted {memory.preempted}, "
        f"cached {memory.pages_cached}, host {growths}, "
        f"device {torch.cuda.memory_allocated() - device:+} bytes"
    )
    assert crowd.finished + crowd.closed == REQUESTS and min(crowd.finished, crowd.closed) > REQUESTS / 10
    assert (memory.pages_used, memory.slots_used) == (0, 0)
    assert memory.preempted > 0, "the pool is meant to be too small"
    assert prefix_cache or memory.pages_cached == 0
    pools = torch.stack([pool.float().abs().max() for pool in engine._runner._attention.pools])
    assert torch.isfinite(pools).all()
    assert growth < GROWTH_BYTES
    assert torch.cuda.memory_allocated() - device < GROWTH_BYTES
