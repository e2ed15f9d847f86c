"""Plans of a leader on CUDA: a second engine that carries them out ends with the same last ids. One device suffices.

Both engines hold the whole model, so nothing is reduced; broadcasts go through a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.conformance.two_ranks import linked
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.group.link import PlanReceiver
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.follower import NodeFollower
from mstar_core.engine.kv.leader import id_checksum
from mstar_core.layers.linear import fuse_projections
from tests.engine.test_passes_loops import FLOWING, captured, flows
from tests.engine.tiny_engine import TinyLM, generate, make_engine
from tests.gpu.test_engine import REQUESTS, WideLM, wide_engine

pytestmark = pytest.mark.gpu


class Relay:
    """Broadcasts between two engines of one thread: the leader's values wait until the follower takes them."""

    def __init__(self) -> None:
        self.values: deque[Tensor] = deque()
        self.leads = True

    def broadcast(self, value: Tensor) -> None:
        if self.leads:
            self.values.append(value.clone())
        else:
            value.copy_(self.values.popleft())


class Apart:
    """A follower that carries out all plans when it is asked to."""

    def __init__(self, node: NodeFollower, receiver: PlanReceiver, relay: Relay) -> None:
        self.node, self.receiver, self.relay = node, receiver, relay
        self.kinds: list[str] = []

    def catch_up(self) -> None:
        self.relay.leads = False
        while (frame := self.receiver.receive(0.0)) is not None:
            for plan in frame.plans:
                self.kinds.append(type(plan).__name__)
                self.node.run(plan, self.receiver.shared)
        self.relay.leads = True
        assert not self.relay.values


@contextmanager
def mirrored(leader: KVCacheEngine, follower: KVCacheEngine, folder: Path) -> Iterator[Apart]:
    relay: Any = Relay()
    with linked(folder) as (sender, receiver):
        leader.lead(sender, relay, 2)
        yield Apart(follower.follower(relay), receiver, relay)


def test_captured_decode_and_prefill_are_replayed(cuda: torch.device, tmp_path: Path) -> None:
    module = WideLM().to(cuda, torch.bfloat16)
    fuse_projections(module)
    sizes = CaptureSizes(decode=(1, 4, 8), prefill=(64,))
    leader, follower = (wide_engine(cuda, module, graphs=sizes, is_captured=False) for _ in range(2))
    with mirrored(leader, follower, tmp_path) as apart:
        leader.capture()
        apart.catch_up()
        generate(REQUESTS, engine=leader, lookahead=1)
        apart.catch_up()
        counts = leader.graph_counts
        assert counts is not None and counts.hits > 20 and counts.misses == 0
        assert apart.kinds.count("Capture") == 4 and follower.counters()["graph_hits"] == counts.hits
        one, other = (id_checksum(each._runner._slots.last) for each in (leader, follower))
        assert int(one) == int(other)


def test_uncaptured_steps_get_their_inputs_by_broadcast(cuda: torch.device, tmp_path: Path) -> None:
    module = WideLM().to(cuda, torch.bfloat16)
    leader, follower = (wide_engine(cuda, module) for _ in range(2))
    with mirrored(leader, follower, tmp_path) as apart:
        generate(REQUESTS, engine=leader, lookahead=1)
        apart.catch_up()
        assert "Step" in apart.kinds
        one, other = (id_checksum(each._runner._slots.last) for each in (leader, follower))
        assert int(one) == int(other)


def test_loop_passes_get_their_device_inputs_by_broadcast(cuda: torch.device, tmp_path: Path) -> None:
    module = TinyLM().to(cuda)
    made = {"device": cuda, "module": module, "spec": FLOWING, "vocab": 0, "graphs": (1,), "is_captured": False}
    leader, follower = (make_engine(**made) for _ in range(2))
    with mirrored(leader, follower, tmp_path) as apart:
        flows(leader, [0, 1, 2])
        captured(leader)
        apart.catch_up()
        wanted = flows(leader, [0, 1, 2])
        apart.catch_up()
        assert follower.counters()["graph_hits"] == leader.counters()["graph_hits"] > 0 and len(wanted) == 3
        for one, other in zip(leader._runner._attention._pools, follower._runner._attention._pools, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(one, other)
