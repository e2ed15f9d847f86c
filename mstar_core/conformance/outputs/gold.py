"""Gold checks: answers equal those of the plugin's reference, however they are computed.

The other checks compare the model with itself, so they pass for a model whose mathematics are wrong everywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.conformance.equality import joined_values, require_port
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.samples import LENGTH, greedy, mixed
from mstar_core.conformance.two_ranks import parallel_runtime
from mstar_core.errors import EngineError
from mstar_core.graph import KV_CACHE
from mstar_core.plugin.check.reference import FUNCTION, MODULE, Reference, ReferenceRequest
from mstar_core.plugin.conformance import CheckSkipped, Subject
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.surface import EVENTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
    from mstar_core.conformance.runtime import LocalRuntime
    from mstar_core.transport.dtypes import Array

TOLERANCE: Final = 1e-3
"""Tolerance of floats, relative and absolute: another library sums in another order, in every layer."""

BATCH: Final = 4
"""Mixed requests beside one of each sample."""

SMALL_BUDGET: Final = 5
"""Tokens of one step. Every prompt of the samples needs several steps."""

CROWD: Final = 8
"""Requests under pressure."""

RANKS: Final = 2
"""Ranks of a tensor-parallel group."""

PAGE: Final = 4
"""Tokens of a page under pressure: small, so that short answers need several."""


def reference(subject: Subject) -> None:
    """Compare greedy answers to each sample, served alone, with the reference."""
    judge = _judge(subject)
    for ask in judge.asks:
        judge.require(ask, judge.small.alone(ask), "served alone")


def reference_batched(subject: Subject) -> None:
    """Compare requests of mixed lengths and samples that share batches."""
    judge = _judge(subject)
    judge.require_all(judge.small.runtime(), judge.mixed, f"among {len(judge.mixed)}")


def reference_chunked(subject: Subject) -> None:
    """Compare prompts that are read in pieces. A model without a KV cache passes: its inputs are never cut."""
    judge = _judge(subject)
    if judge.small.has_cache:
        settings = RuntimeSettings(token_budget=SMALL_BUDGET, prefix_cache=False)
        judge.require_all(judge.small.runtime(settings), judge.mixed, f"in pieces of {SMALL_BUDGET}")


def reference_preempted(subject: Subject) -> None:
    """Compare requests that preempt each other. A model without a KV cache passes.

    They are those whose answers grow most: a pool that holds little more than one of them admits several.
    """
    judge = _judge(subject)
    if not judge.small.has_cache:
        return
    roomy = RuntimeSettings(page_size=PAGE, prefix_cache=False)
    held = [_pages_held(judge.small.runtime(roomy), ask) for ask in judge.mixed]
    ask, counts = max(zip(judge.mixed, held, strict=True), key=lambda pair: (pair[1][-1] - pair[1][0], -pair[1][-1]))
    # A request is admitted if the cache could hold its longest answer, not the one that it will write.
    pages = counts[-1] + -(-LENGTH // PAGE)
    runtime = judge.small.runtime(replace(roomy, pages=pages))
    judge.require_all(runtime, [ask] * CROWD, f"in a cache of {pages} pages")
    if not any(runner.memory().preempted for worker in runtime.workers for runner in worker.runners.values()):
        raise CheckSkipped(f"no request was preempted in a cache of {pages} pages")


def reference_split(subject: Subject) -> None:
    """Compare requests of a model on two ranks: its nodes in turn, or a single node's walks, whose cache then moves."""
    judge = _judge(subject)
    small = judge.small
    runtime = small.runtime(ranks=2) if small.can_spread else small.runtime(plan=_by_walk(small))
    judge.require_all(runtime, judge.mixed, "on two ranks")


def reference_parallel(subject: Subject) -> None:
    """Compare requests of a model whose tensor-parallel nodes are divided over two ranks. One without any passes."""
    judge = _judge(subject)
    small = judge.small
    nodes = [node for node in small.spec.nodes if node.tensor_parallel and node.of is None]
    if not nodes:
        return
    undivided = [
        f"{what} of node {node.name}" for node in nodes for what, count in node.parallel_sizes if count % RANKS
    ]
    if undivided:
        raise CheckSkipped(f"the {undivided[0]} in the tiny checkpoint cannot be divided by {RANKS}")
    names = [node.name for node in nodes]
    with parallel_runtime(small.spec, small.folder, [names], processor=small.processor) as (runtime, followers):
        judge.require_all(runtime, judge.mixed, f"with {', '.join(names)} on two ranks")
    if not all(follower.kinds for follower in followers):
        raise EngineError("no sample runs a tensor-parallel node")


class _Judge:
    """Reference answers of one miniature, computed once. Owned by the miniature's cache entry."""

    def __init__(self, small: Miniature, compute: Reference) -> None:
        self.small = small
        self._compute = compute
        self._known: dict[str, Mapping[str, Array]] = {}
        self._api = small.runtime().api
        self.asks = [greedy(small.spec, ask) for ask in small.asks]
        self.mixed = [*self.asks, *(greedy(small.spec, ask) for ask in mixed(small.spec, BATCH))]

    def require_all(self, runtime: LocalRuntime, asks: Sequence[SampleRequest], how: str) -> None:
        """Serve requests together and compare each answer."""
        for ask, outcome in zip(asks, runtime.ask(*asks), strict=True):
            self.require(ask, outcome, how)

    def require(self, ask: SampleRequest, outcome: RequestOutcome, how: str) -> None:
        """Raise EngineError if an answer is not the reference's."""
        what = f"{ask.name} {how}"
        if outcome.status != "finished":
            raise EngineError(f"{what}: the request {outcome.status}", outcome.cause)
        expected = self._answer(ask)
        modality_of = {item.port: item.modality for item in outcome.items if item.modality not in EVENTS}
        unknown = sorted(set(modality_of) ^ set(expected))
        if unknown:
            detail = f"the model gives {', '.join(sorted(modality_of))}; the reference {', '.join(sorted(expected))}"
            raise EngineError(f"{what}: port {unknown[0]} is on one side only", detail)
        for port, modality in modality_of.items():
            values = joined_values(outcome.of(port))
            reference_values = np.asarray(expected[port]).reshape(-1)
            if values.dtype.kind in "iu" and reference_values.dtype.kind in "iu":
                reference_values = reference_values.astype(values.dtype)
            require_port(modality, [reference_values], [values], f"{what}: {modality} of port {port}", TOLERANCE)

    def _answer(self, ask: SampleRequest) -> Mapping[str, Array]:
        key = repr((ask.text, ask.name, sorted(ask.params.items()), sorted(ask.outputs), ask.seed))
        if key not in self._known:
            params, outputs, inputs = self._api.prepared(ask)
            names = {item.name for item in param_specs(type(params))}
            chosen = {name: value for name, value in inputs.plain_params(params).items() if name in names}
            request = ReferenceRequest(
                arrays=inputs.arrays,
                segments=inputs.segments,
                facts=inputs.facts,
                params=replace(params, **chosen),
                seed=ask.seed if getattr(params, "seed", None) is None else params.seed,
                outputs=frozenset(outputs),
            )
            self._known[key] = self._compute(self.small.folder, request)
        return self._known[key]


_JUDGES: Final[weakref.WeakKeyDictionary[Miniature, _Judge]] = weakref.WeakKeyDictionary()


def _judge(subject: Subject) -> _Judge:
    """Return the judge of the subject's miniature. Raises CheckSkipped without a reference or the library of it."""
    compute = _offered(subject)
    small = miniature(subject)
    if small not in _JUDGES:
        _JUDGES[small] = _Judge(small, compute)
    return _JUDGES[small]


def _offered(subject: Subject) -> Reference:
    target = subject.model.model
    package = "" if target is None else target.partition(":")[0].rpartition(".")[0]
    module = f"{package}.{MODULE}"
    if not package or importlib.util.find_spec(module) is None:
        raise CheckSkipped(f"the plugin has no {module} with {FUNCTION}(folder, request)")
    try:
        return cast("Reference", vars(importlib.import_module(module))[FUNCTION])
    except ModuleNotFoundError as error:
        raise CheckSkipped(f"{error.name} is not installed here") from error


def _pages_held(runtime: LocalRuntime, ask: SampleRequest) -> list[int]:
    """Return the pages that a node with a cache holds while a request runs: ascending, at least one number."""
    runtime.send(ask)
    held = {0}
    while runtime.step():
        held |= {runner.memory().pages_used for worker in runtime.workers for runner in worker.runners.values()}
    return sorted(held - {0}) or [0]


def _by_walk(small: Miniature) -> Plan:
    """Return a plan of a single node: the first walk runs on rank 0 and the others on rank 1, or two replicas."""
    (name,) = small.built
    walks = sorted(small.walks, key=[walk for part in small.spec.partitions for walk in part.walks].index)
    ranks = tuple(RankPlan(rank=rank, device="cpu", nodes=(name,)) for rank in (0, 1))
    if small.built[name].node.engine is not KV_CACHE or len(walks) < 2:
        return Plan(ranks=ranks, placements=(NodePlacement(node=name, replicas=((0,), (1,))),))
    first, *others = walks
    placements = (
        NodePlacement(node=name, replicas=((0,),), walks=(first,)),
        NodePlacement(node=name, replicas=((1,),), walks=tuple(others)),
    )
    return Plan(ranks=ranks, placements=placements)
