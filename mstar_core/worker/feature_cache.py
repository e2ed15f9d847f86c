"""Outputs of stateless nodes by the content of their inputs: equal media are encoded once. Used by the executor.

A segment's inputs have a content key if the plugin's processor gives one (`SegmentInputs.content`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from mstar_core.graph.runtime.actions import Ref, RunInput, Special
from mstar_core.graph.spec.nodes import PARAM_PREFIX, STATELESS
from mstar_core.worker.request import parameter_name

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask

Key = tuple[object, ...]
"""Node, outputs and inputs of a task: content keys of its inputs and values of its parameters."""


class FeatureCache:
    """Copies of outputs on their device, the least recently used dropped first. Owned by the executor.

    limit_bytes: most bytes of all entries; 0 keeps none. hits, misses: tasks with a content key.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Key, dict[str, Tensor]] = OrderedDict()

    def key(
        self, task: CompiledTask, inputs: Mapping[str, Ref], outputs: tuple[str, ...], contents: Mapping[str, bytes],
        numbers: Mapping[str, float | int | bool],
    ) -> Key | None:  # fmt: skip
        """Return the key of a task, or None if its outputs may depend on more than content and parameters.

        contents: content keys of the Run's inputs; numbers: the request's parameters.
        """
        if not self.limit_bytes or not contents or task.node.spec.engine is not STATELESS or task.path:
            return None
        parts: list[object] = []
        for port, ref in sorted(inputs.items()):
            match ref:
                case RunInput(name) if contents.get(name):
                    parts.append((port, contents[name]))
                case Special(name) if name.startswith(PARAM_PREFIX):
                    parts.append((port, numbers.get(parameter_name(name))))
                case _:
                    return None
        return (task.name, outputs, *parts)

    def find(self, key: Key) -> dict[str, Tensor] | None:
        """Return the outputs of a key and count the look-up."""
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found

    def put(self, key: Key, outputs: Mapping[str, Tensor]) -> None:
        """Keep copies of outputs, which may be views of buffers that later steps overwrite."""
        size = sum(value.nbytes for value in outputs.values())
        if size > self.limit_bytes or key in self._entries:
            return
        self.used_bytes += size
        while self.used_bytes > self.limit_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.used_bytes -= sum(value.nbytes for value in dropped.values())
        self._entries[key] = {port: _copied(value) for port, value in outputs.items()}

    def counters(self, name: str) -> dict[str, float]:
        """Return the gauges and counters of this rank; empty if nothing is kept."""
        if not self.hits + self.misses:
            return {}
        return {
            f"{name}.feature_hits": float(self.hits),
            f"{name}.feature_misses": float(self.misses),
            f"{name}.feature_bytes": float(self.used_bytes),
        }


def _copied(value: Tensor) -> Tensor:
    if value.is_cuda:
        value.record_stream(torch.cuda.current_stream(value.device))  # its node may have a stream of its own
    return value.clone()
