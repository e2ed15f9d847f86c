"""Inputs of a KV node: inputs of a job become passes.

Ids, numbers and small values stay on the host until their step, so that those of all passes share one copy.
Called when a job starts, and when a log is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.jobs import accepts
from mstar_core.engine.ports import POSITIONS, id_port, position_dtype
from mstar_core.engine.scheduling.sequence import ForwardPass, Logged
from mstar_core.engine.transfers import is_small_on_host, upload
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import STEP, Attend, PortType, keyword

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.engine.steps.plan import Position
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

_TOKEN_AXIS: Final = "n"

MOST_FORMS: Final = 1024
"""Input forms that are cached."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Layout of inputs of certain shapes. words: input name and keyword; the others as in `ForwardPass`."""

    words: tuple[tuple[str, str], ...]
    axes: dict[str, int | None]
    tokens: int
    per_item: frozenset[str]


class InputProcessor:
    """Turns job inputs into passes: keywords, token axes, token counts, positions. Owned by the scheduler of one node.

    A pass whose tokens come from one port is cut along that port's token axis, and other ports of that length with it;
    the axis is the one that its type calls `n`, else the first. A pass that joins several ports, or adds tokens, runs
    whole and alone, as does one with an input of a variable length that is not its own. Ports in `NodeSpec.row_ports`,
    and inputs of a fixed declared shape that are not cut with the tokens, hold one value per batch item: they are
    stacked with those of other passes, which run whole. Numbers (0-d) reach the module as one value per packed token.
    """

    def __init__(self, spec: NodeSpec, module: KVModule, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = torch.empty(0, device=device).device  # with its index
        self._dtype = dtype
        self._types: dict[str, PortType] = {name: spec.port(name) for name in spec.ports}
        self._exact = {name for name, port in self._types.items() if port.dtype not in ("any", "bf16", "f16")}
        self._position_dtype = position_dtype(spec)
        self.id_port = id_port(spec)
        self.takes_step = accepts(module, keyword(STEP))
        self._item_ports = frozenset(map(keyword, spec.row_ports))
        self._step_ports = frozenset(spec.step_ports)
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._id_names = {self.id_port, *((spec.sampling.port,) if spec.sampling else ())}

    def is_id_port(self, name: str) -> bool:
        """Return whether a port of this name carries ids that the engine may feed back by itself."""
        return name in self._id_names

    def on_device(self, name: str, value: Tensor) -> Tensor:
        """Return a port's value on the node's device; floats are in the node's dtype unless declared otherwise."""
        return self._typed(name, value if value.device == self._device else upload(value, self._device))

    def at_hand(self, name: str, value: Tensor) -> Tensor:
        """Return the same, but leave a small host value on the host until its step."""
        return self._typed(name, value) if is_small_on_host(value) else self.on_device(name, value)

    def kept(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a loop on the device, so that its passes do not upload them again; numbers stay."""
        is_small = {name: not value.dim() or name == POSITIONS for name, value in inputs.items()}
        return {name: value if is_small[name] else self.on_device(name, value) for name, value in inputs.items()}

    def forward_pass(
        self,
        inputs: dict[str, Tensor],
        attend: Attend,
        position: Position,
        base: int,
        *,
        step: int = 0,
        iterations: int = 1,
    ) -> ForwardPass:
        """Return the pass for these inputs. Raises EngineError when their sizes contradict each other.

        step: its iteration of a loop; iterations: how many it holds from that one on.
        """
        values = dict(inputs)
        given = values.pop(POSITIONS, None) if attend.positions == "given" else None
        after: Position = 0
        if given is not None:
            given = given.to(self._position_dtype)
            # Positions of one pass may end before those of an earlier one, such as the sound of a video.
            after = max(position, given.max().item() + 1) if given.numel() else position
            given = upload(given, self._device)
        ids = self._only_ids(values, attend)
        if ids is not None and given is None:
            ports, form = {self.id_port: ids}, _Form((), {self.id_port: 0}, len(ids), frozenset())
        else:
            ports, form = self._measured(values, attend, step, iterations)
        tokens = form.tokens
        if tokens < 1:
            raise EngineError(f"node {self._spec.name} got an empty input", "0 tokens", node=self._spec.name)
        if attend.positions == "given" and (given is None or given.shape[-1] != tokens):
            raise EngineError(
                f"node {self._spec.name} needs one given position per token",
                f"{tokens} tokens, positions {None if given is None else list(given.shape)}",
                node=self._spec.name,
            )
        return ForwardPass(
            ports=ports,
            axes=form.axes,
            tokens=tokens,
            attend=attend,
            position=position,
            base=base,
            given=given,
            after=after,
            is_ids=ids is not None and given is None,
            per_item=form.per_item,
            iterations=iterations,
        )

    def owned(self, forward: ForwardPass) -> ForwardPass:
        """Return the same pass, not yet computed, with copies of host values, whose owner may overwrite them."""
        copy = forward.bare()
        copy.ports = {n: value.clone() if is_small_on_host(value) else value for n, value in forward.ports.items()}
        return copy

    def replayed(self, entry: Logged, base: int, history: np.ndarray) -> ForwardPass:
        """Return the pass that recomputes a logged span. history: the slot's ids, int32, in cache order."""
        if entry.forward is None:
            ids = torch.from_numpy(history[base : base + entry.tokens].astype("int64"))
            return ForwardPass(
                ports={self.id_port: ids},
                axes={self.id_port: 0},
                tokens=entry.tokens,
                attend=Attend(),
                position=entry.position,
                base=base,
                is_ids=True,
                is_replay=True,
            )
        forward = entry.forward.bare(is_replay=True)
        forward.base = base
        return forward

    def lists(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a loop that have one entry per iteration, prepared once for all its passes."""
        return {name: self.at_hand(name, value) for name, value in inputs.items() if self._is_list(name, value)}

    def holds_iterations(self, inputs: dict[str, Tensor], attend: Attend) -> bool:
        """Return whether a pass of these inputs can hold several loop iterations: all but numbers are per batch item.

        All iterations append before any attends, so each sees those before it, as in passes of their own.
        """
        is_known = attend.write and attend.tokens is not None and not attend.extra
        if not is_known or attend.mask != "full" or attend.positions == "given" or not self._step_ports & inputs.keys():
            return False
        return all(name in self._item_ports or not value.dim() for name, value in inputs.items())

    def _only_ids(self, ports: dict[str, Tensor], attend: Attend) -> Tensor | None:
        """Return the ids of a pass that consists of nothing else, int64 [n]."""
        if len(ports) != 1 or attend.extra or attend.tokens is not None:
            return None
        ((name, value),) = ports.items()
        if name not in self._id_names or value.dtype not in (torch.int64, torch.int32):
            return None
        return value.reshape(-1).to(torch.int64)

    # -- ports and tokens --------------------------------------------------------------------------------------------

    def _measured(
        self, inputs: dict[str, Tensor], attend: Attend, step: int, iterations: int
    ) -> tuple[dict[str, Tensor], _Form]:
        """Return the ports by keyword, and their form."""
        form = self._form(inputs, attend, iterations)
        ports: dict[str, Tensor] = {}
        for name, word in form.words:
            value = inputs[name]
            if name in self._item_ports:
                ports[word] = self._of_item(name, value, step, iterations)
            elif value.dim():
                ports[word] = self.at_hand(name, value)
            else:
                ports[word] = self._number(name, value, form.tokens, iterations)
        return ports, form

    def _form(self, inputs: dict[str, Tensor], attend: Attend, iterations: int) -> _Form:
        """Return how inputs of these shapes are taken. Cached: most passes are like an earlier one."""
        shapes = [(name, value.shape, value.is_floating_point()) for name, value in inputs.items()]
        key = (attend, iterations, *shapes)
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            form = self._forms[key] = self._new_form(inputs, attend, iterations)
        return form

    def _new_form(self, inputs: dict[str, Tensor], attend: Attend, iterations: int) -> _Form:
        solid = {name: value for name, value in inputs.items() if name not in self._item_ports and value.dim()}
        # A port with one value per batch item may hold the item's tokens, such as the vectors of an image.
        items = {name: inputs[name] for name in self._spec.sequence if name in self._item_ports and name in inputs}
        tokens, is_cut = self._counted({**solid, **items}, attend, iterations, ", ".join(inputs))
        words = tuple((name, name if name in self._item_ports else keyword(name)) for name in inputs)
        axes: dict[str, int | None] = {}
        per_item = set(self._item_ports & inputs.keys())
        for name, word in words:
            if name in solid:
                axes[word] = self._axis(name, solid[name], tokens) if is_cut else None
                if is_cut and axes[word] is None and iterations == 1 and self._has_fixed_shape(name, solid[name]):
                    per_item.add(word)
            else:
                axes[word] = None if name in self._item_ports else 0
        return _Form(words, axes, tokens, frozenset(per_item))

    def _counted(self, solid: dict[str, Tensor], attend: Attend, iterations: int, names: str) -> tuple[int, bool]:
        """Return the tokens of a pass, and whether its ports can be cut. solid: ports with dimensions, not per item."""
        sequence = [name for name in self._spec.sequence if name in solid]
        if not sequence and not (self._spec.sequence and attend.tokens is not None):
            sequence = list(solid)[:1]
        if not sequence and attend.tokens is None:
            raise EngineError(f"node {self._spec.name} got a job without tokens", names, node=self._spec.name)
        counted = sum(self._tokens(name, solid[name]) for name in sequence) + attend.extra
        tokens = counted if attend.tokens is None else attend.tokens * iterations
        if not sequence:
            return tokens, self._spec.sequence != () and not attend.extra
        return tokens, len(sequence) == 1 and not attend.extra and tokens == counted

    def _has_fixed_shape(self, name: str, value: Tensor) -> bool:
        """Return whether a port's type declares every dimension of this value as a number."""
        shape = self._types[name].shape if name in self._types else ()
        return value.dim() == len(shape) and all(isinstance(size, int) for size in shape)

    def _of_item(self, name: str, value: Tensor, step: int, iterations: int) -> Tensor:
        """Return a port's value for the batch items of a pass; of several iterations, on a first axis."""
        value = self.at_hand(name, value)
        if not self._is_list(name, value):
            return value if iterations == 1 else value.expand(iterations, *value.shape)
        if step + iterations > value.shape[0]:
            raise EngineError(
                f"port {name!r} of node {self._spec.name} ends before its loop",
                f"it holds {value.shape[0]} entries for {step + iterations} iterations",
                node=self._spec.name,
            )
        entries = value[step : step + iterations]
        return entries if iterations == 1 else entries.unsqueeze(1)

    def _is_list(self, name: str, value: Tensor) -> bool:
        return name in self._step_ports and value.dim() == len(self._types[name].shape)

    def _number(self, name: str, value: Tensor, tokens: int, iterations: int) -> Tensor:
        """Return a number once per token; the step counts up over several iterations."""
        typed = self._typed(name, value)
        if iterations > 1 and name == STEP:
            steps = typed + torch.arange(iterations, device=typed.device)
            return steps[:, None].expand(iterations, tokens // iterations).reshape(-1)
        return typed.expand(tokens)

    def _typed(self, name: str, value: Tensor) -> Tensor:
        if name in self._exact or value.dtype == self._dtype or not value.is_floating_point():
            return value
        return value.to(self._dtype)

    def _tokens(self, name: str, value: Tensor) -> int:
        """Return the tokens of a sequence port: one per id, or one per vector of the last axis."""
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
