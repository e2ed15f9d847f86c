"""Silver checks: a request ends cleanly however it ends, and leaves other requests unharmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mstar_core.conformance.equality import require_equal
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime, ended
from mstar_core.conformance.samples import greedy, mixed, of_lengths
from mstar_core.engine.base import Handle
from mstar_core.errors import EngineError
from mstar_core.messages.names import CONDUCTOR, worker_name
from mstar_core.plugin.conformance import Subject

AT_ONCE: Final = 8
PLACES: Final = 3
GROUP: Final = 8
"""Requests that are cancelled in successive steps before the check looks for leaks."""

DEADLINE_S: Final = 5.0
INJECTED: Final = "a fault made by the check"


def cancel_anywhere(subject: Subject) -> None:
    """Cancel after each step of a request, on one rank and, if the model has two nodes, on two.

    Groups contain one sample each; a last group contains all samples mixed. Of two ranks, the producer learns of the
    end last, so that its values reach a consumer that has already ended.
    """
    small = miniature(subject)
    covering = _covering(small)
    runtime = small.runtime()
    for ask in covering:
        _cancel_each(runtime, of_lengths(ask, GROUP), f"{ask.name} on 1 rank")
    if small.can_spread:
        runtime = small.runtime(ranks=2, slow=[(CONDUCTOR, worker_name(0))])
        for ask in covering:
            _cancel_each(runtime, of_lengths(ask, GROUP), f"{ask.name} on 2 ranks")
    _cancel_each(runtime, mixed(small.spec, max(GROUP, len(small.asks))), "all samples")


def _cancel_each(runtime: LocalRuntime, group: Sequence[SampleRequest], what: str) -> None:
    """Send a group of requests and cancel one more with each step, until the whole group has ended by itself."""
    after, is_over = 0, False
    while not is_over:
        calls = [runtime.send(each) for each in group]
        for _ in range(after):
            runtime.step()
        is_over = all(call.is_over for call in calls)
        for call in calls:
            runtime.cancel(call)
            runtime.step()
        runtime.run()
        require_clean(runtime, f"{what}, cancelled after {after} to {after + len(group) - 1} steps")
        after += len(group)


def _covering(small: Miniature) -> list[SampleRequest]:
    """Choose few samples that together take every walk: always the one that adds the most."""
    left, chosen = set(small.walks), list[SampleRequest]()
    while True:
        ask = max(small.asks, key=lambda each: len(left & small.served_alone(each).walks))
        added = left & small.served_alone(ask).walks
        if not added:
            return chosen
        left -= added
        chosen.append(ask)


def deadline(subject: Subject) -> None:
    """Fail a request past its deadline with that cause; the others give the same answers as alone."""
    small = miniature(subject)
    runtime = small.runtime()
    others = [greedy(small.spec, ask) for ask in mixed(small.spec, 2)]
    late = runtime.send(replace(small.asks[0], deadline_s=DEADLINE_S))
    calls = [runtime.send(ask) for ask in others]
    runtime.step()  # the conductor has received all of them and none has finished
    runtime.clock.sleep(DEADLINE_S + 2.0)
    runtime.expire()
    runtime.run()
    outcome = ended(late)
    if outcome.status != "failed" or outcome.error is None or outcome.error.code != "timeout":
        raise EngineError("a request past its deadline did not fail with it", f"it {outcome.status} {outcome.cause}")
    for ask, call in zip(others, calls, strict=True):
        require_equal(small.alone(ask), ended(call), f"{ask.name} beside a late one")
    require_clean(runtime, "after a deadline")


@dataclass(slots=True)
class Fault:
    """Makes one node fail for one request, at its run number `at`. has_fired: whether that run was reached."""

    node: str
    at: int
    victim: int = 0
    count: int = 0
    has_fired: bool = False

    def __call__(self, node: str, handles: Sequence[Handle]) -> None:
        if node != self.node or self.victim not in handles:
            return
        if self.has_fired or self.count >= self.at:
            self.has_fired = True  # also if the batch is retried one by one
            raise RuntimeError(INJECTED)
        self.count += 1


def failing_node(subject: Subject) -> None:
    """Make each node fail, at its first run and later: the request ends naming the node, the others go on."""
    small = miniature(subject)
    others = [greedy(small.spec, ask) for ask in mixed(small.spec, 2)]
    for name in small.built:
        fired = [_fail(small, Fault(name, at), others) for at in (0, 2)]
        if not any(fired):
            raise EngineError(f"no sample reaches node {name}", hint="add a Sample that does, or delete the node")


def _fail(small: Miniature, fault: Fault, others: Iterable[SampleRequest]) -> bool:
    """Return whether any sample reached the fault."""
    for ask in small.asks:
        if small.served_alone(ask).runs.get(fault.node, 0) <= fault.at:
            continue
        runtime = small.runtime(faults=fault)
        victim = runtime.send(ask)
        fault.victim, fault.count = victim.handle, 0
        calls = [(other, runtime.send(other)) for other in others]
        runtime.run()
        what = f"node {fault.node} failing at run {fault.at}"
        if fault.has_fired:
            outcome = ended(victim)
            if outcome.status != "failed":
                raise EngineError(f"{what}: its request {outcome.status}")
            if fault.node not in outcome.cause:
                raise EngineError(f"{what}: the error does not name it", outcome.cause)
        for other, call in calls:
            require_equal(small.alone(other), ended(call), f"{what}: {other.name} beside it")
        require_clean(runtime, what)
        if fault.has_fired:
            return True
    return False


def eight_at_once(subject: Subject) -> None:
    """Run eight mixed requests in three slots with a small token budget, on two ranks if the model has two nodes."""
    small = miniature(subject)
    asks = [greedy(small.spec, ask) for ask in mixed(small.spec, AT_ONCE)]
    runtime = small.runtime(RuntimeSettings(slots=PLACES, token_budget=64), ranks=2 if small.can_spread else 1)
    for ask, outcome in zip(asks, runtime.ask(*asks), strict=True):
        require_equal(small.alone(ask), outcome, f"{ask.name} of {AT_ONCE}")
    require_clean(runtime, f"after {AT_ONCE} requests")


def require_clean(runtime: LocalRuntime, when: str) -> None:
    """Raise EngineError naming the first leak."""
    left = runtime.leaks()
    if left:
        raise EngineError(f"{when}: {left[0]}", f"{len(left)} resources are still held" if len(left) > 1 else "")
