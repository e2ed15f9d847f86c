"""Turns jobs into forwards: which port is cut along which axis, how many tokens, at which position.

Called by the KV engine when a job starts and when the log of a preempted branch is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.kv.batch import chunk_positions
from mstar_core.engine.kv.sequence import ForwardPass, Logged
from mstar_core.engine.ports import keyword, takes
from mstar_core.engine.transfers import is_small_on_host, upload
from mstar_core.errors import EngineError
from mstar_core.graph.spec.nodes import STEP, Attend, PortType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

POSITIONS: Final = "positions"
"""Port that brings positions where `Attend.positions` is `given`; tokens on its last axis."""

_TOKEN_AXIS: Final = "n"

MOST_FORMS: Final = 1024
"""Forms of passes that are remembered."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How inputs of certain shapes are taken. words: input name and keyword; axes, tokens: see `ForwardPass`."""

    words: tuple[tuple[str, str], ...]
    axes: dict[str, int | None]
    tokens: int


class InputProcessor:
    """Knows the ports of one node. Owned by its KV engine.

    A pass whose tokens are one port's is cut along that port's token axis, and other ports of that length with it;
    the axis is the one its type calls `n`, else the first. A pass that joins several ports, or puts tokens around
    them, runs whole and alone; so does one with an input that is neither a number nor of that length. A pass with ports
    of which a row has one value (`NodeSpec.row_ports`) runs whole, beside those of other rows. Numbers (0-d inputs such
    as STEP) reach the module as one value per packed token, under `ports.keyword` of their name. They and small values
    stay on the host until a step takes them, so that they travel with those of all other rows.
    """

    def __init__(self, spec: NodeSpec, module: KVModule, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = torch.empty(0, device=device).device  # with its index
        self._dtype = dtype
        self._types: dict[str, PortType] = {name: spec.port(name) for name in spec.ports}
        self._fixed = {name for name, port in self._types.items() if port.dtype not in ("any", "bf16", "f16")}
        self.id_port = id_port(spec)
        self.takes_step = takes(module, keyword(STEP))
        self.row_ports = frozenset(map(keyword, spec.row_ports))
        self._step_ports = frozenset(spec.step_ports)
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._id_names = {self.id_port, *((spec.sampling.port,) if spec.sampling else ())}

    def is_id_port(self, name: str) -> bool:
        """Whether a port of this name carries ids that the engine may feed back by itself."""
        return name in self._id_names

    def on_device(self, name: str, value: Tensor) -> Tensor:
        """A port's value on this node's device; floats that are not declared otherwise come in the node's dtype."""
        return self._typed(name, value if value.device == self._device else upload(value, self._device))

    def at_hand(self, name: str, value: Tensor) -> Tensor:
        """The same for a value that one step takes: a small one of the host stays there until then."""
        return self._typed(name, value) if is_small_on_host(value) else self.on_device(name, value)

    def kept(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of a loop that goes on pass by pass, where they need not travel again with each; numbers do."""
        is_small = {name: not value.dim() or name == POSITIONS for name, value in inputs.items()}
        return {name: value if is_small[name] else self.on_device(name, value) for name, value in inputs.items()}

    def forward(
        self, inputs: dict[str, Tensor], attend: Attend, position: int, base: int, *, step: int = 0, iterations: int = 1
    ) -> ForwardPass:
        """Make the pass for these inputs. Raises EngineError when their sizes contradict each other.

        step: the iteration of a loop that it is; iterations: how many it holds from that one on, as `ForwardPass` says.
        """
        found = dict(inputs)
        given = found.pop(POSITIONS, None) if attend.positions == "given" else None
        after = int(given.max()) + 1 if given is not None and given.numel() else 0
        given = None if given is None else self.on_device(POSITIONS, given)
        ids = self._only_ids(found, attend)
        axes: dict[str, int | None]
        if ids is not None and given is None:
            ports, axes, tokens = {self.id_port: ids}, {self.id_port: 0}, len(ids)
        else:
            ports, axes, tokens = self._measured(found, attend, step, iterations)
        if tokens < 1:
            raise EngineError(f"node {self._spec.name} got an empty input", "0 tokens", node=self._spec.name)
        if attend.positions == "given" and (given is None or given.shape[-1] != tokens):
            raise EngineError(
                f"node {self._spec.name} needs one given position per token",
                f"{tokens} tokens, positions {None if given is None else list(given.shape)}",
                node=self._spec.name,
            )
        return ForwardPass(
            ports=ports, axes=axes, tokens=tokens, attend=attend, position=position, base=base, given=given,
            after=after, is_ids=ids is not None and given is None, per_row=self.row_ports & ports.keys(),
            iterations=iterations,
        )  # fmt: skip

    def owned(self, forward: ForwardPass) -> ForwardPass:
        """The same pass, not yet computed, with values of its own: whoever lent one of the host may use it again."""
        again = forward.bare()
        again.ports = {
            name: value.clone() if is_small_on_host(value) else value for name, value in forward.ports.items()
        }
        return again

    def replayed(self, entry: Logged, base: int, history: np.ndarray) -> ForwardPass:
        """The pass that computes a logged stretch again. history: the slot's ids, int32, cache order."""
        if entry.forward is None:
            ids = torch.from_numpy(history[base : base + entry.tokens].astype("int64"))
            return ForwardPass(
                ports={self.id_port: ids}, axes={self.id_port: 0}, tokens=entry.tokens, attend=Attend(),
                position=entry.position, base=base, is_ids=True, is_replay=True,
            )  # fmt: skip
        again = entry.forward.bare(is_replay=True)
        again.base = base
        return again

    def lists(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those inputs of a loop that have an entry for each iteration, made ready once: its passes cut them."""
        return {name: self.at_hand(name, value) for name, value in inputs.items() if self._is_list(name, value)}

    def holds_iterations(self, inputs: dict[str, Tensor], attend: Attend) -> bool:
        """Whether a pass of these inputs can be several iterations of a loop: all but numbers are of rows.

        Each appends before any attends, so that it sees those before it as in passes of their own.
        """
        is_known = attend.write and attend.tokens is not None and not attend.extra
        if not is_known or attend.mask != "full" or attend.positions == "given" or not self._step_ports & inputs.keys():
            return False
        return all(name in self.row_ports or not value.dim() for name, value in inputs.items())

    def _only_ids(self, ports: dict[str, Tensor], attend: Attend) -> Tensor | None:
        """The ids of a pass that consists of nothing else, int64 [n]."""
        if len(ports) != 1 or attend.extra or attend.tokens is not None:
            return None
        ((name, value),) = ports.items()
        if name not in self._id_names or value.dtype not in (torch.int64, torch.int32):
            return None
        return value.reshape(-1).to(torch.int64)

    def _measured(
        self, inputs: dict[str, Tensor], attend: Attend, step: int, iterations: int
    ) -> tuple[dict[str, Tensor], dict[str, int | None], int]:
        """Ports as keywords, the axis that each is cut along, and the tokens of the pass."""
        form = self._form(inputs, attend, iterations)
        made: dict[str, Tensor] = {}
        for name, word in form.words:
            value = inputs[name]
            if name in self.row_ports:
                made[word] = self._of_row(name, value, step, iterations)
            elif value.dim():
                made[word] = self.at_hand(name, value)
            else:
                made[word] = self._number(name, value, form.tokens, iterations)
        return made, form.axes, form.tokens

    def _form(self, inputs: dict[str, Tensor], attend: Attend, iterations: int) -> _Form:
        """How inputs of these shapes are taken: found out once, as most passes are like one before."""
        shapes = [(name, value.shape, value.is_floating_point()) for name, value in inputs.items()]
        key = (attend, iterations, *shapes)
        found = self._forms.get(key)
        if found is None:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            found = self._forms[key] = self._new_form(inputs, attend, iterations)
        return found

    def _new_form(self, inputs: dict[str, Tensor], attend: Attend, iterations: int) -> _Form:
        solid = {name: value for name, value in inputs.items() if name not in self.row_ports and value.dim()}
        tokens, is_cut = self._counted(solid, attend, iterations, ", ".join(inputs))
        words = tuple((name, name if name in self.row_ports else keyword(name)) for name in inputs)
        axes: dict[str, int | None] = {}
        for name, word in words:
            if name in solid:
                axes[word] = self._axis(name, solid[name], tokens) if is_cut else None
            else:
                axes[word] = None if name in self.row_ports else 0
        return _Form(words, axes, tokens)

    def _counted(self, solid: dict[str, Tensor], attend: Attend, iterations: int, names: str) -> tuple[int, bool]:
        """Tokens of a pass, and whether it can be cut. solid: its ports that are neither rows' nor numbers."""
        sequence = [name for name in self._spec.sequence if name in solid] or list(solid)[:1]
        if not sequence and attend.tokens is None:
            raise EngineError(f"node {self._spec.name} got a job without tokens", names, node=self._spec.name)
        counted = sum(self._tokens(name, solid[name]) for name in sequence) + attend.extra
        tokens = counted if attend.tokens is None else attend.tokens * iterations
        return tokens, len(sequence) == 1 and not attend.extra and tokens == counted

    def _of_row(self, name: str, value: Tensor, step: int, iterations: int) -> Tensor:
        """What the rows that the pass is get of a port: of several iterations with these on a first axis."""
        value = self.at_hand(name, value)
        if not self._is_list(name, value):
            return value if iterations == 1 else value.expand(iterations, *value.shape)
        if step + iterations > value.shape[0]:
            raise EngineError(
                f"port {name!r} of node {self._spec.name} ends before its loop",
                f"it holds {value.shape[0]} entries, {step + iterations} iterations ask for one each",
                node=self._spec.name,
            )
        own = value[step : step + iterations]
        return own if iterations == 1 else own.unsqueeze(1)

    def _is_list(self, name: str, value: Tensor) -> bool:
        return name in self._step_ports and value.dim() == len(self._types[name].shape)

    def _number(self, name: str, value: Tensor, tokens: int, iterations: int) -> Tensor:
        """A number for each token; of several iterations the step goes on with each."""
        typed = self._typed(name, value)
        if iterations > 1 and name == STEP:
            each = typed + torch.arange(iterations, device=typed.device)
            return each[:, None].expand(iterations, tokens // iterations).reshape(-1)
        return typed.expand(tokens)

    def _typed(self, name: str, value: Tensor) -> Tensor:
        if name in self._fixed or value.dtype == self._dtype or not value.is_floating_point():
            return value
        return value.to(self._dtype)

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


def id_port(spec: NodeSpec) -> str:
    """Under which name ids reach the module: `tokens` where the node has that port, else the port it samples."""
    if "tokens" in spec.ports or spec.sampling is None:
        return "tokens"
    return spec.sampling.port


def packed_ports(
    chunks: Sequence[ScheduledChunk], ids: Tensor | None, device: torch.device
) -> dict[str, Tensor | list[Tensor]]:
    """The module's ports. ids: int64 [n] on the device, of decode rows before the chunks, which are then ids too."""
    first = chunks[0].forward
    ports: dict[str, Tensor | list[Tensor]] = {}
    for name, axis in first.axes.items():
        if name in first.per_row:
            ports[name] = _of_rows([value for chunk in chunks for value in chunk.forward.of_rows(name)], device)
            continue
        cuts = [_cut(chunk, chunk.forward.ports[name], chunk.forward.axes[name]) for chunk in chunks]
        cuts = _together(cuts, device, axis or 0)
        if ids is not None:
            cuts.insert(0, ids)
        ports[name] = cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim=axis or 0)
    return ports


def packed_positions(chunks: Sequence[ScheduledChunk], own: Tensor | None, device: torch.device) -> Tensor:
    """Positions of all tokens, int64 [T] or as a port gives them. own: on the device, of decode rows before."""
    where = [chunk_positions(chunk.forward, chunk.count) for chunk in chunks]
    if all(chunk.forward.given is None for chunk in chunks):
        where = _together(where, device, 0)
    if own is not None:
        where.insert(0, own)
    return where[0] if len(where) == 1 else torch.cat(where, dim=-1)


def _of_rows(values: list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """One value per row, stacked where their shapes agree."""
    if any(value.shape != values[0].shape for value in values):
        return [upload(value, device) for value in values]
    if all(value.is_cpu for value in values):
        return upload(torch.stack(values), device)
    return torch.stack([upload(value, device) for value in values])


def _cut(chunk: ScheduledChunk, value: Tensor, axis: int | None) -> Tensor:
    if axis is None or chunk.count == chunk.forward.tokens:
        return value
    return value.narrow(axis, chunk.forward.done, chunk.count)


def _together(values: list[Tensor], device: torch.device, axis: int) -> list[Tensor]:
    """Values of several chunks on the device, joined and copied at once where they are on the host."""
    if not all(value.is_cpu for value in values):
        return [upload(value, device) for value in values]
    return [upload(values[0].contiguous() if len(values) == 1 else torch.cat(values, dim=axis), device)]
