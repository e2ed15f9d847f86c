"""Content keys of tasks, and outputs of stateless nodes by them: equal media are encoded once. Used by the executor.

A segment's inputs have a content key if the plugin's processor gives one (`SegmentInputs.content`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.cache.prefix_cache import DIGEST_BYTES
from mstar_core.graph.compile.compiled import Kind, Source
from mstar_core.graph.declare.nodes import PARAM_PREFIX, STATELESS
from mstar_core.graph.runtime.actions import Key, Ref, RunInput, Special
from mstar_core.worker.state.request import Feature, parameter_name

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask
    from mstar_core.worker.state.request import ActiveRun

SMALL_BYTES: Final = 1 << 16
"""Most bytes of an input without a content key that is hashed."""


def content_of(
    inputs: Mapping[str, Ref], run: ActiveRun, numbers: Mapping[str, float | int | bool], salt: bytes
) -> bytes | None:
    """Return a key of all that determines the inputs of a task; None if something that is unknown may.

    Known are inputs of the run with a content key, small ones on the host by their values, parameters of the request
    (numbers), and outputs of stateless tasks whose inputs are known, on whatever rank. salt: of the request.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for port, ref in sorted(inputs.items()):
        part = _part(ref, run, numbers, salt)
        if part is None:
            return None
        digest.update(f"{port}:{len(part)};".encode() + part)
    return salt + digest.digest()


def output_key(task: CompiledTask, content: bytes) -> bytes:
    """Return the key of the outputs of a stateless task. content: of its inputs, see `content_of`."""
    return task.name.encode() + content


def _part(ref: Ref, run: ActiveRun, numbers: Mapping[str, float | int | bool], salt: bytes) -> bytes | None:
    match ref:
        case RunInput(name):
            return run.message.contents.get(name) or _hashed(run.inputs.get(name))
        case Special(name) if name.startswith(PARAM_PREFIX):
            return repr(numbers.get(parameter_name(name))).encode()
        case Key(address, port, ()):
            known = run.contents.get(address) or _computed_elsewhere(address, run, numbers, salt)
            return None if known is None else known + port.encode()
    return None


def _computed_elsewhere(
    address: int, run: ActiveRun, numbers: Mapping[str, float | int | bool], salt: bytes
) -> bytes | None:
    """Return the key of the outputs of a stateless task on another rank, which that rank makes in the same way."""
    task = run.share.walk.tasks[address]
    if address in run.share.tasks or task.path or task.node.spec.engine is not STATELESS:
        return None
    inputs: dict[str, Ref] = {}
    for entry in task.inputs:
        match entry.source:
            case Source(Kind.RUN, _, name) if name in run.message.inputs:
                inputs[entry.port] = RunInput(name)
            case Source(Kind.RUN) if entry.optional:
                pass
            case Source(Kind.TASK, at, port):
                inputs[entry.port] = Key(at, port, ())
            case Source(Kind.SPECIAL, _, name):
                inputs[entry.port] = Special(name, 0)
            case _:
                return None
    content = content_of(inputs, run, numbers, salt)
    return None if content is None else output_key(task, content)


def _hashed(value: Tensor | None) -> bytes | None:
    if value is None or value.device.type != "cpu" or value.nbytes > SMALL_BYTES:
        return None
    form = f"{value.dtype}{tuple(value.shape)};".encode()
    return form + value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class FeatureCache:
    """Copies of outputs on their device, the least recently used dropped first. Owned by the executor.

    limit_bytes: most bytes of all entries; 0 keeps none. hits, misses: tasks with a content key.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Feature, dict[str, Tensor]] = OrderedDict()

    def find(self, key: Feature) -> dict[str, Tensor] | None:
        """Return the outputs of a key and count the look-up."""
        outputs = self._entries.get(key)
        if outputs is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return outputs

    def put(self, key: Feature, outputs: Mapping[str, Tensor]) -> None:
        """Keep copies of outputs, which may be views of buffers that later steps overwrite."""
        size = sum(value.nbytes for value in outputs.values())
        if size > self.limit_bytes or key in self._entries:
            return
        self.used_bytes += size
        while self.used_bytes > self.limit_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.used_bytes -= sum(value.nbytes for value in dropped.values())
        self._entries[key] = {port: _copied(value) for port, value in outputs.items()}

    def clear(self) -> None:
        """Drop all outputs."""
        self._entries.clear()
        self.used_bytes = 0

    def counters(self) -> dict[str, float]:
        """Return the gauges and counters of this rank; empty if nothing is kept."""
        if not self.hits + self.misses:
            return {}
        return {"feature_hits": self.hits, "feature_misses": self.misses, "feature_bytes": self.used_bytes}


def _copied(value: Tensor) -> Tensor:
    if value.is_cuda:
        value.record_stream(torch.cuda.current_stream(value.device))  # its node may have a stream of its own
    return value.clone()
