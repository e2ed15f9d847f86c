"""Silver: requests end cleanly however they end, and hurt nobody. Each check takes a Subject."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mstar_core.conformance.bench import Bench, ended
from mstar_core.conformance.compare import require_equal
from mstar_core.conformance.desk import Ask
from mstar_core.conformance.material import greedy, mixed, of_lengths
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.conformance.nodes import Settings
from mstar_core.engine.base import Handle
from mstar_core.errors import EngineError
from mstar_core.messages.names import CONDUCTOR, worker_name
from mstar_core.plugin.conformance import Subject

AT_ONCE: Final = 8
PLACES: Final = 3
GROUP: Final = 8
"""Requests that are cancelled one step after the other before anybody looks for what they left."""

DEADLINE_S: Final = 5.0
INJECTED: Final = "a fault made by the check"


def cancel_anywhere(subject: Subject) -> None:
    """Cancel after each step that a request takes, on one rank and, where there are nodes enough, on two.

    Of two ranks the one that feeds the other hears of the end last, so that its values arrive where all is over.
    """
    small = miniature(subject)
    for ranks in (1, 2) if small.can_spread else (1,):
        bench = small.bench(ranks=ranks, slow=[(CONDUCTOR, worker_name(0))] if ranks > 1 else [])
        for ask in _covering(small):
            _cancel_each(bench, ask, f"{ask.name} on {ranks} {'rank' if ranks == 1 else 'ranks'}")


def _cancel_each(bench: Bench, ask: Ask, what: str) -> None:
    """Requests sent together in groups, the next of them cancelled with each step, until a whole group has ended."""
    after, is_over = 0, False
    while not is_over:
        calls = [bench.send(each) for each in of_lengths(ask, GROUP)]
        for _ in range(after):
            bench.step()
        is_over = all(call.is_over for call in calls)
        for call in calls:
            bench.cancel(call)
            bench.step()
        bench.run()
        require_clean(bench, f"{what}, cancelled after {after} to {after + GROUP - 1} steps")
        after += GROUP


def _covering(small: Miniature) -> list[Ask]:
    """As few samples as take every walk that samples take."""
    left, chosen = set(small.walks), []
    for ask in small.asks:
        bench = small.bench()
        bench.ask(ask)
        if bench.post.walks & left:
            left -= bench.post.walks
            chosen.append(ask)
    return chosen


def deadline(subject: Subject) -> None:
    """A request past its deadline fails and says so; those beside it go on as if alone."""
    small = miniature(subject)
    bench = small.bench()
    others = [greedy(small.spec, ask) for ask in mixed(small.spec, 2)]
    late = bench.send(replace(small.asks[0], deadline_s=DEADLINE_S))
    calls = [bench.send(ask) for ask in others]
    bench.step()  # the conductor knows them all, and none has been told to be done
    bench.clock.leap(DEADLINE_S + 2.0)
    bench.expire()
    bench.run()
    outcome = ended(late)
    if outcome.status != "failed" or outcome.error is None or outcome.error.code != "timeout":
        raise EngineError("a request past its deadline did not fail for it", f"it {outcome.status} {outcome.cause}")
    for ask, call in zip(others, calls, strict=True):
        require_equal(small.alone(ask), ended(call), f"{ask.name} beside a late one")
    require_clean(bench, "after a deadline")


@dataclass(slots=True)
class Fault:
    """Makes one node fail for one request, at its firing number `at`. has_fired: whether it came to that."""

    node: str
    at: int
    victim: int = 0
    count: int = 0
    has_fired: bool = False

    def __call__(self, node: str, handles: Sequence[Handle]) -> None:
        if node != self.node or self.victim not in handles:
            return
        if self.has_fired or self.count >= self.at:
            self.has_fired = True  # also when the batch is tried again one by one
            raise RuntimeError(INJECTED)
        self.count += 1


def failing_node(subject: Subject) -> None:
    """Each node in turn fails, at once and later: its request ends with the node's name, the others go on."""
    small = miniature(subject)
    others = [greedy(small.spec, ask) for ask in mixed(small.spec, 2)]
    for name in small.built:
        fired = [_fail(small, Fault(name, at), others) for at in (0, 2)]
        if not any(fired):
            raise EngineError(f"no sample reaches node {name}", hint="add a Sample that does, or delete the node")


def _fail(small: Miniature, fault: Fault, others: Iterable[Ask]) -> bool:
    """Whether any sample came to the fault."""
    for ask in small.asks:
        bench = small.bench(faults=fault)
        victim = bench.send(ask)
        fault.victim, fault.count = victim.handle, 0
        calls = [(other, bench.send(other)) for other in others]
        bench.run()
        what = f"node {fault.node} failing at firing {fault.at}"
        if fault.has_fired:
            outcome = ended(victim)
            if outcome.status != "failed":
                raise EngineError(f"{what}: its request {outcome.status}")
            if fault.node not in outcome.cause:
                raise EngineError(f"{what}: the error does not name it", outcome.cause)
        for other, call in calls:
            require_equal(small.alone(other), ended(call), f"{what}: {other.name} beside it")
        require_clean(bench, what)
        if fault.has_fired:
            return True
    return False


def eight_at_once(subject: Subject) -> None:
    """Eight mixed requests where three have room at a time, with a small budget, on two ranks if there can be two."""
    small = miniature(subject)
    asks = [greedy(small.spec, ask) for ask in mixed(small.spec, AT_ONCE)]
    bench = small.bench(Settings(slots=PLACES, token_budget=64), ranks=2 if small.can_spread else 1)
    for ask, outcome in zip(asks, bench.ask(*asks), strict=True):
        require_equal(small.alone(ask), outcome, f"{ask.name} of {AT_ONCE}")
    require_clean(bench, f"after {AT_ONCE} requests")


def require_clean(bench: Bench, when: str) -> None:
    """Raise EngineError naming what is still held."""
    left = bench.leaks()
    if left:
        raise EngineError(f"{when}: {left[0]}", f"{len(left)} things are held" if len(left) > 1 else "")
