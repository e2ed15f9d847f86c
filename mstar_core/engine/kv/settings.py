"""Sizes and options of one KV node on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.errors import ConfigError

if TYPE_CHECKING:
    from mstar_core.constraints.matcher import Grammars
    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.lora import AdapterBank


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """Sizes and options of one KV node on one device.

    num_pages, page_size, max_slots: of its cache; max_seq_len: most tokens of a sequence. vocab: ids that it can draw,
    0 without sampling. token_budget: of a step. attention: name of a backend. lookahead: steps that may be launched
    before an earlier one is collected. steps_at_once: most captured decode steps of one launch. image_share: see
    DeviceShare. graphs: sizes of the steps to capture. loop: ports per sequence of the node's resident loop, see
    `graph.compile.resident`; None if it carries only its sampled id. adapters: LoRA adapters of the node's module,
    None without any. grammars: compiles the grammars of requests; None at a node whose ids no grammar constrains.
    """

    device: torch.device
    dtype: torch.dtype
    num_pages: int
    page_size: int
    max_slots: int
    max_seq_len: int
    vocab: int
    token_budget: int
    attention: str = "torch"
    lookahead: int = 0
    steps_at_once: int = 1
    image_share: float = 0.5
    prefix_cache: bool = True
    graphs: CaptureSizes = field(default_factory=CaptureSizes)
    loop: LoopPorts | None = None
    adapters: AdapterBank | None = None
    grammars: Grammars | None = None

    def check(self, spec: NodeSpec) -> None:
        """Raise ConfigError for a node without a cache, or fewer slots than one request needs."""
        if spec.kv is None:
            raise ConfigError(f"node {spec.name} has no cache", hint="a KV_CACHE node declares KVSpec", key=spec.name)
        slots = spec.kv.slots(requests=1)
        if self.max_slots < slots:
            raise ConfigError(
                f"node {spec.name} needs {slots} slots for one request, {self.max_slots} are configured",
                f"{len(spec.kv.branches)} for each of one cache and {spec.kv.rows} candidates",
                key="max_slots",
            )
