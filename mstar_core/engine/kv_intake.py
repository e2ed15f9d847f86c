"""Turns jobs into firings: which port is cut along which axis, how many tokens, at which position.

Called by the KV engine when a job starts and when the log of a preempted branch is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.kv_sequence import Firing, Logged
from mstar_core.engine.kv_step import id_port
from mstar_core.engine.ports import keyword, takes
from mstar_core.engine.upload import upload
from mstar_core.errors import EngineError
from mstar_core.graph.nodes import STEP, Attend, PortType

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.engine.kv_view import KVModule
    from mstar_core.graph.nodes import NodeSpec

POSITIONS: Final = "positions"
"""Port that brings positions where `Attend.positions` is `given`; tokens on its last axis."""

_TOKEN_AXIS: Final = "n"


class Intake:
    """Knows the ports of one node. Owned by its KV engine.

    A pass whose tokens are one port's is cut along that port's token axis, and other ports of that length with it;
    the axis is the one its type calls `n`, else the first. A pass that joins several ports, or puts tokens around
    them, runs whole and alone; so does one with an input that is neither a number nor of that length. A pass with ports
    of which a row has one value (`NodeSpec.row_ports`) runs whole, beside those of other rows. Numbers (0-d inputs such
    as STEP) reach the module as one value per packed token, under `ports.keyword` of their name.
    """

    def __init__(self, spec: NodeSpec, module: KVModule, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._types: dict[str, PortType] = {name: spec.port(name) for name in spec.ports}
        self.id_port = id_port(spec)
        self.takes_step = takes(module, keyword(STEP))
        self._row_ports = frozenset(map(keyword, spec.row_ports))
        self._id_names = {self.id_port, *((spec.sampling.port,) if spec.sampling else ())}

    def is_id_port(self, name: str) -> bool:
        """Whether a port of this name carries ids that the engine may feed back by itself."""
        return name in self._id_names

    def on_device(self, name: str, value: Tensor) -> Tensor:
        """A port's value on this node's device; floats that are not declared otherwise come in the node's dtype."""
        declared = self._types.get(name)
        is_free = declared is None or declared.dtype in ("any", "bf16", "f16")
        dtype = self._dtype if value.is_floating_point() and is_free else value.dtype
        return upload(value, self._device).to(dtype)

    def firing(self, inputs: dict[str, Tensor], attend: Attend, position: int, base: int) -> Firing:
        """Make the pass for these inputs. Raises EngineError when their sizes contradict each other."""
        found = dict(inputs)
        given = found.pop(POSITIONS, None) if attend.positions == "given" else None
        after = int(given.max()) + 1 if given is not None and given.numel() else 0
        given = None if given is None else self.on_device(POSITIONS, given)
        ids = self._only_ids(found, attend)
        axes: dict[str, int | None]
        if ids is not None and given is None:
            ports, axes, tokens = {self.id_port: ids}, {self.id_port: 0}, len(ids)
        else:
            placed = {name: self.on_device(name, value) for name, value in found.items()}
            ports, axes, tokens = self._measured(placed, attend)
        if tokens < 1:
            raise EngineError(f"node {self._spec.name} got an empty input", "0 tokens", node=self._spec.name)
        if attend.positions == "given" and (given is None or given.shape[-1] != tokens):
            raise EngineError(
                f"node {self._spec.name} needs one given position per token",
                f"{tokens} tokens, positions {None if given is None else list(given.shape)}",
                node=self._spec.name,
            )
        return Firing(
            ports=ports, axes=axes, tokens=tokens, attend=attend, position=position, base=base, given=given,
            after=after, is_ids=ids is not None and given is None, per_row=self._row_ports & set(ports),
        )  # fmt: skip

    def replayed(self, entry: Logged, base: int, history: np.ndarray) -> Firing:
        """The pass that computes a logged stretch again. history: the slot's ids, int32, cache order."""
        if entry.firing is None:
            ids = torch.from_numpy(history[base : base + entry.tokens].astype("int64"))
            return Firing(
                ports={self.id_port: ids}, axes={self.id_port: 0}, tokens=entry.tokens, attend=Attend(),
                position=entry.position, base=base, is_ids=True, is_replay=True,
            )  # fmt: skip
        old = entry.firing
        return Firing(
            ports=old.ports, axes=old.axes, tokens=old.tokens, attend=old.attend, position=old.position, base=base,
            given=old.given, after=old.after, is_ids=old.is_ids, is_replay=True, per_row=old.per_row,
        )  # fmt: skip

    def _only_ids(self, ports: dict[str, Tensor], attend: Attend) -> Tensor | None:
        """The ids of a pass that consists of nothing else, int64 [n]."""
        if len(ports) != 1 or attend.extra or attend.tokens is not None:
            return None
        ((name, value),) = ports.items()
        if name not in self._id_names or value.dtype not in (torch.int64, torch.int32):
            return None
        return value.reshape(-1).to(torch.int64)

    def _measured(
        self, ports: dict[str, Tensor], attend: Attend
    ) -> tuple[dict[str, Tensor], dict[str, int | None], int]:
        """Ports as keywords, the axis that each is cut along, and the tokens of the pass."""
        numbers = {n: value for n, value in ports.items() if not value.dim() and n not in self._row_ports}
        whole = {n: value for n, value in ports.items() if n in self._row_ports}
        solid = {name: value for name, value in ports.items() if value.dim() and name not in whole}
        sequence = [name for name in self._spec.sequence if name in solid] or list(solid)[:1]
        if not sequence and attend.tokens is None:
            raise EngineError(
                f"node {self._spec.name} got a job without tokens", ", ".join(ports), node=self._spec.name
            )
        counted = sum(self._tokens(name, solid[name]) for name in sequence) + attend.extra
        tokens = counted if attend.tokens is None else attend.tokens
        is_cut = len(sequence) == 1 and not attend.extra and tokens == counted
        axes: dict[str, int | None] = {}
        for name, value in solid.items():
            axes[keyword(name)] = self._axis(name, value, tokens) if is_cut else None
        made = {keyword(name): value for name, value in (solid | whole).items()}
        axes |= dict.fromkeys(map(keyword, whole))
        for name, value in numbers.items():
            made[keyword(name)] = value.expand(tokens)
            axes[keyword(name)] = 0
        return made, axes, tokens

    def _tokens(self, name: str, value: Tensor) -> int:
        """Tokens of a sequence port: one per id, one per vector of the last axis."""
        named = self._named_axis(name, value)
        if named is not None:
            return int(value.shape[named])
        return value.numel() if not value.is_floating_point() else value.numel() // max(1, value.shape[-1])

    def _axis(self, name: str, value: Tensor, tokens: int) -> int | None:
        named = self._named_axis(name, value)
        if named is not None:
            return named if value.shape[named] == tokens else None
        return 0 if value.shape[0] == tokens else None

    def _named_axis(self, name: str, value: Tensor) -> int | None:
        shape = self._types[name].shape if name in self._types else ()
        return shape.index(_TOKEN_AXIS) if _TOKEN_AXIS in shape and value.dim() == len(shape) else None
