"""One parallel pass over the kernels of a rank before its first capture. Used by `build`.

With an empty kernel cache, compilation is most of a start. All steps that the rank captures and warms up are traced
first, without running their kernels, which forked processes then compile side by side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.cuda_graphs.compilation import compile_in_parallel, zero_filled
from mstar_core.engine.module import node_module
from mstar_core.engine.warmup import trace_captures, trace_requests, uncounted
from mstar_core.layers.linear import PreparedLayer
from mstar_core.worker.start.warmup import samples_only_ids, warm_prefill

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.engine.runner import NodeRunner
    from mstar_core.graph import NodeSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedNode:
    """A node of the rank with what can trace its steps."""

    spec: NodeSpec
    runner: NodeRunner
    module: nn.Module


def compile_rank(
    nodes: Sequence[TracedNode],
    walks: Callable[[], None],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compile the kernels of all nodes in one pass. On a later start it traces two steps per node.

    walks: runs the model's samples. report: called with the kernels compiled so far and their number. A node that
    cannot be traced is logged and does not fail the start: its kernels are compiled one by one at their first launch.
    """
    compile_in_parallel(lambda compiling: _trace(nodes, walks, compiling), "all nodes", report)


def _trace(nodes: Sequence[TracedNode], walks: Callable[[], None], compiling: Compiling) -> None:
    """Trace the steps of all nodes, and what requests run beside them unless the cache has the kernels of the steps."""
    try:
        with zero_filled(), ExitStack() as counts:  # what a kernel that does not run would write must be a valid index
            for node in nodes:
                counts.enter_context(uncounted(node.runner))
            for node in nodes:
                _guarded(node.spec.name, partial(_trace_steps, node, compiling))
            if compiling.launched and not compiling.has_missed:
                return
            for node in nodes:
                if samples_only_ids(node.spec):
                    _guarded(node.spec.name, partial(warm_prefill, node.runner, node.spec))
            _guarded("the samples", walks)
            for node in nodes:
                _guarded(node.spec.name, partial(trace_captures, [node.runner], compiling))
    finally:
        for node in nodes:
            node.runner.forget_prefixes()


def _trace_steps(node: TracedNode, compiling: Compiling) -> None:
    module = node_module(node.module)
    node.runner.trace(compiling)
    with torch.inference_mode():
        module.trace(compiling)
        for layer in _layers(node.module):
            layer.trace()
    trace_requests([(node.runner, module.warmup_requests())], compiling)


def _layers(module: nn.Module) -> Collection[PreparedLayer]:
    """Return the layers that trace their kernels themselves, one of each kind and size."""
    layers = [layer for layer in module.modules() if isinstance(layer, PreparedLayer)]
    return {(type(layer), layer.traced_as): layer for layer in reversed(layers)}.values()


def _guarded(name: str, work: Callable[[], None]) -> None:
    """Do work of one node. An error is logged: the other nodes are still compiled ahead."""
    started = time.monotonic()
    try:
        work()
        log.info("kernels of %s traced in %.2f s", name, time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 an optimisation only
        log.warning("kernels of %s are compiled one by one: %s: %s", name, type(error).__name__, error)
