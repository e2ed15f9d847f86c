"""A model's modules, and their engines as a worker makes them. Modules are built once, engines once per runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.cache.sizing import PoolRequest, plan_pool
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph import KV_CACHE, NodeSpec
from mstar_core.plugin.model import ModelContext
from mstar_core.plugin.spec import ModelSpec
from mstar_core.worker.start.build import compute_dtype, largest_batch, load_nodes
from mstar_core.worker.state.walks import resident_loops

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.graph import LoopPorts
    from mstar_core.layers.kv_view import KVModule

CPU: Final = torch.device("cpu")
POOL_LIMIT_BYTES: Final = 512 << 20
"""Upper limit of a miniature's KV cache."""

Faults = Callable[[str, Sequence[Handle]], None]
"""Called with a node's name and the requests of a batch before each forward pass; raises to make it fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Deployment settings. token_budget: tokens of one step. slots: requests that run at once.

    pages: of each cache (None: as many as all slots can fill). prefix_cache: whether prompts are cached.
    feature_cache_bytes, yields_to_sound, first_sound_requests: of each worker.
    """

    token_budget: int = 2048
    slots: int = 8
    page_size: int = 16
    pages: int | None = None
    max_seq_len: int = 1024
    prefix_cache: bool = True
    lookahead: int = 0
    feature_cache_bytes: int = 1 << 20
    yields_to_sound: bool = True
    first_sound_requests: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltNode:
    """One node with its weights. loop: ports per sequence of its resident loop."""

    node: NodeSpec
    module: nn.Module
    vocab: int
    loop: LoopPorts | None = None


def build_nodes(spec: ModelSpec, folder: Path) -> dict[str, BuiltNode]:
    """Build every node of a model on the CPU in float32. Raises PluginError if it has no model code."""
    context = ModelContext(
        spec=spec, folder=folder, device=CPU, dtype=compute_dtype(None, CPU), model_kwargs=spec.model_kwargs
    )
    loops = resident_loops(spec)
    return {
        node.name: BuiltNode(node=node, module=module, vocab=vocab, loop=loops.get(node.name))
        for node, module, vocab in load_nodes(spec, context, spec.nodes)
    }


def make_runners(
    built: Mapping[str, BuiltNode],
    names: Sequence[str],
    settings: RuntimeSettings,
    clock: Callable[[], float],
    faults: Faults | None,
) -> dict[str, NodeRunner]:
    """Make one engine for each of a rank's nodes."""
    chosen = [built[name] for name in names if name in built]
    return {node.node.name: _runner(node, settings, clock, faults) for node in chosen}


def _runner(
    built: BuiltNode, settings: RuntimeSettings, clock: Callable[[], float], faults: Faults | None
) -> NodeRunner:
    node = built.node
    node_faults = None if faults is None else partial(faults, node.name)
    if node.engine is not KV_CACHE:
        return StatelessEngine(
            node,
            built.module,
            device=CPU,
            dtype=compute_dtype(node.dtype, CPU),
            max_batch=largest_batch(CPU),
            lookahead=settings.lookahead,
            clock=clock,
            faults=node_faults,
        )
    assert node.kv is not None, "the graph check admits no KV node without a cache"
    slots, dtype = node.kv.slots(settings.slots), compute_dtype(None, CPU)
    # Rows share what their requests leave: a pool for all that a node allows would be made anew for every check.
    requests = settings.slots * len(node.kv.branches)
    pool = plan_pool(
        node.kv,
        PoolRequest(page_size=settings.page_size, pages=settings.pages),
        node=node.name,
        dtype=dtype,
        free_bytes=POOL_LIMIT_BYTES,
        longest=0,
        most_tokens=requests * settings.max_seq_len,
    )
    sizes = KVSettings(
        device=CPU,
        dtype=dtype,
        num_pages=pool.pages,
        page_size=pool.page_size,
        max_slots=slots,
        max_seq_len=settings.max_seq_len,
        vocab=built.vocab,
        token_budget=settings.token_budget,
        lookahead=settings.lookahead,
        prefix_cache=settings.prefix_cache,
        loop=built.loop,
    )
    return KVCacheEngine(node, cast("KVModule", built.module), sizes, clock=clock, faults=node_faults)
