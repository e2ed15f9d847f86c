"""Kinds of captured passes: what passes of one graph have in common, and which pass is of which kind."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.steps.device import AHEAD_TOKENS
from mstar_core.engine.transfers import SMALL_BYTES
from mstar_core.graph.declare.nodes import STEP, keyword

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.plan import PassPlan

MOST_ITERATIONS: Final = 64
"""Most iterations of a loop in one graph; a longer loop runs uncaptured."""

MOST_TOKENS: Final = 1600
"""Most tokens of a captured pass that only reads. A longer one outlasts its launches, and a graph keeps its memory."""

STEP_PORT: Final = keyword(STEP)
"""Keyword of the iteration number."""

POSITIONS: Final = "positions"
"""Name of the positions among the inputs of a step."""


class StepFamily(Enum):
    """Families of kinds, each with its order among captures.

    IDS: prompts of ids that the node samples after. DECODE: one token of each sequence in a resident loop. LOOP:
    iterations of loops. PREFIX: whole unmasked passes on empty caches. PROMPT: causal passes with any inputs.
    """

    IDS = 0
    DECODE = 1
    LOOP = 2
    PREFIX = 3
    PROMPT = 4


@dataclass(frozen=True, slots=True)
class PortForm:
    """An input of static shape. axis: of its tokens, None if it has one value per batch item. shape: without that axis.

    is_staged: values on the host share the copy of the attention metadata. is_packed: a value is that of a batch item,
    whose tokens the module gives in parts, see `NodeModule.packed_ports`.
    """

    name: str
    dtype: torch.dtype
    axis: int | None
    shape: tuple[int, ...]
    is_staged: bool = False
    is_packed: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the value of one token or batch item."""
        return self.dtype.itemsize * math.prod(self.shape)

    def count(self, tokens: int, items: int) -> int:
        """Return the number of its values for so many tokens and batch items."""
        return items if self.axis is None else tokens

    def size(self, count: int) -> tuple[int, ...]:
        """Return the shape of `count` values."""
        at = self.axis or 0
        return (*self.shape[:at], count, *self.shape[at:])

    def part(self, whole: Tensor, count: int) -> Tensor:
        """Return the first `count` values."""
        return whole.narrow(self.axis or 0, 0, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """Static properties that the passes of one graph share.

    item_tokens: tokens of each batch item, 0 if any number. samples: an id is drawn for each pass; adjusts: after its
    logits are adjusted; masks: among the ids that its mask allows. carry: output -> input keyword, from one
    iteration to the next. is_append_only: only the appended keys and values are used.
    """

    family: StepFamily
    ports: tuple[PortForm, ...]
    positions: PortForm
    causal: bool
    writes: bool = True
    samples: bool = False
    adjusts: bool = False
    masks: bool = False
    item_tokens: int = 0
    iterations: int = 1
    carry: tuple[tuple[str, str], ...] = ()
    is_append_only: bool = False

    def __hash__(self) -> int:
        """Hash a few fields: this runs several times per replay, and hashing all ports takes as long as the rest."""
        return hash((self.family.value, self.item_tokens, self.writes, self.iterations, len(self.ports)))

    @property
    def is_fresh(self) -> bool:
        """Whether its sequences have empty caches."""
        return self.family is StepFamily.PREFIX

    @property
    def runs_ahead(self) -> bool:
        """Whether it holds several iterations that each append."""
        return self.writes and self.iterations > 1

    @property
    def carried(self) -> frozenset[str]:
        """Inputs that each iteration but the first takes from the one before."""
        return frozenset(into for _, into in self.carry)

    @property
    def inputs(self) -> tuple[PortForm, ...]:
        """All inputs, the positions first."""
        return (self.positions, *self.ports)

    def __str__(self) -> str:
        adjusting = variant_text(adjusts=self.adjusts, masks=self.masks)
        names = ", ".join(port.name for port in self.ports)
        match self.family:
            case StepFamily.LOOP:
                often = f", {self.iterations} iterations" if self.iterations > 1 else ""
                return f"{self.item_tokens} tokens {'appended' if self.writes else 'beside the cache'}{often}"
            case StepFamily.PROMPT:
                return f"prompt ({names}){adjusting}"
            case StepFamily.IDS:
                return f"prefill{adjusting}"
            case _:
                return f"{self.family.name.lower()}{adjusting}"


def variant_text(*, adjusts: bool, masks: bool) -> str:
    """Return what a variant of a step does to logits, in words; empty for the default step."""
    does = [text for text, is_on in (("adjusts logits", adjusts), ("masks ids", masks)) if is_on]
    return f" that {' and '.join(does)}" if does else ""


# -- the kind of a pass -----------------------------------------------------------------------------------------------


def prompt_of_ids(planned: PassPlan, positions: torch.dtype) -> StepKind | None:
    """Return the kind of causal ids that are appended, with no output but the drawn id; None for any other pass."""
    if not planned.is_ids or planned.attend.mask != "causal" or planned.attend.positions != "running":
        return None
    # A general loop keeps its drawn id on the device, where the next replay would overwrite it.
    is_loop = planned.sampling is not None and planned.loop is not None
    if not planned.attend.write or planned.wants or is_loop:
        return None
    (name,) = planned.ports
    return ids_kind(name, positions, adjusts=planned.adjusts, masks=planned.mask is not None)


def ids_kind(name: str, positions: torch.dtype, *, adjusts: bool = False, masks: bool = False) -> StepKind:
    """Return the kind of prompts of ids under a port."""
    ids = PortForm(name, torch.int64, 0, (), is_staged=True)
    place = PortForm(POSITIONS, positions, 0, (), is_staged=True)
    return StepKind(
        family=StepFamily.IDS,
        ports=(ids,),
        positions=place,
        causal=True,
        samples=True,
        adjusts=adjusts,
        masks=masks,
    )


def decode_kind(positions: torch.dtype, *, adjusts: bool = False, masks: bool = False) -> StepKind:
    """Return the kind of decode steps."""
    place = PortForm(POSITIONS, positions, 0, (), is_staged=True)
    return StepKind(
        family=StepFamily.DECODE,
        ports=(),
        positions=place,
        causal=True,
        samples=True,
        adjusts=adjusts,
        masks=masks,
        item_tokens=1,
    )


def prompt(planned: PassPlan, *, samples: bool) -> StepKind | None:
    """Return the kind of a causal pass that appends, outside loops; None for any other."""
    attend = planned.attend
    if attend.mask != "causal" or not attend.write or planned.iterations > 1 or planned.loop is not None:
        return None
    forms = []
    for name, axis in sorted(planned.axes.items()):
        value, is_per_item = planned.ports[name], name in planned.per_item
        if axis is None and not is_per_item:
            return None
        forms.append(_form(name, value, None if is_per_item else axis, leads=not is_per_item, is_staged=False))
    if planned.per_item and not planned.is_whole:
        return None
    item_tokens = planned.count if planned.per_item else 0
    return StepKind(
        family=StepFamily.PROMPT,
        ports=tuple(forms),
        positions=_positions_form(planned),
        causal=True,
        samples=samples,
        adjusts=planned.adjusts,
        masks=planned.mask is not None,
        item_tokens=item_tokens,
    )


def prefix(planned: PassPlan, packed: Collection[str] = ()) -> StepKind | None:
    """Return the kind of a whole, unmasked pass on an empty cache with inputs per token; None for any other.

    packed: ports of batch items that the module can pack, see `NodeModule.packed_ports`.
    """
    attend = planned.attend
    if planned.is_ids or planned.given is not None or not planned.per_item.issubset(packed):
        return None
    if attend.mask != "full" or not attend.write or planned.sampling is not None or planned.loop is not None:
        return None
    if isinstance(planned.position, float) or not planned.is_whole or planned.iterations > 1 or planned.cached:
        return None
    forms = []
    for name in sorted(planned.ports):
        value = planned.ports[name]
        if name in planned.per_item:
            if value.shape[0] + attend.extra != planned.count:
                return None
            forms.append(replace(_form(name, value, 0, leads=True, is_staged=False), is_packed=True))
            continue
        if planned.axes[name] != 0 or value.shape[0] != planned.count:
            return None
        forms.append(_form(name, value, 0, leads=True, is_staged=value.dim() == 1))
    return StepKind(family=StepFamily.PREFIX, ports=tuple(forms), positions=_positions_form(planned), causal=False)


def loop_pass(planned: PassPlan) -> StepKind | None:
    """Return the kind of one whole, unmasked pass of a loop, None if it is another or is not worth a graph."""
    if planned.is_ids or planned.is_replay or planned.given is not None or planned.sampling is not None:
        return None
    if isinstance(planned.position, float) or not planned.is_whole or planned.attend.mask != "full":
        return None
    is_short = planned.attend.write or planned.item_tokens <= MOST_TOKENS
    if not is_short or not is_of_loop(planned):
        return None
    forms = []
    for name in sorted(planned.ports):
        value, is_per_item = planned.ports[name], name in planned.per_item
        if not is_per_item and (planned.axes[name] != 0 or value.shape[0] != planned.count):
            return None
        leads = not is_per_item or planned.iterations > 1
        form = _form(name, value, None if is_per_item else 0, leads=leads, is_staged=False)
        item_bytes = form.size_bytes * form.count(planned.item_tokens, 1)
        forms.append(replace(form, is_staged=item_bytes <= SMALL_BYTES))
    writes = planned.attend.write
    return StepKind(
        family=StepFamily.LOOP,
        ports=tuple(forms),
        positions=_positions_form(planned),
        causal=False,
        writes=writes,
        item_tokens=planned.item_tokens,
        is_append_only=writes and not planned.wants,
    )


def is_of_loop(planned: PassPlan) -> bool:
    """Return whether a pass is an iteration of a loop. Other passes have too many lengths to capture."""
    return planned.loop is not None or STEP_PORT in planned.ports


def whole_loop(planned: PassPlan, single: StepKind) -> StepKind | None:
    """Return the kind of all iterations of a loop that only reads, None if a stop rule may end it or it has begun."""
    loop = planned.loop
    if loop is None or loop.ends_early or loop.iteration:
        return None
    carry = tuple((port, keyword(into)) for port, into in sorted(loop.carry.items()))
    if not 1 <= loop.limit <= MOST_ITERATIONS or any(into not in planned.ports for _, into in carry):
        return None
    return replace(single, iterations=loop.limit, carry=carry)


def passes_ahead(passes: Sequence[PassPlan], single: StepKind) -> StepKind | None:
    """Return the kind of several iterations of these passes, whose kind is `single`, if all of them may run ahead."""
    iterations = min(each.loop.ahead if each.loop is not None else 1 for each in passes)
    if not single.writes or iterations == 1:
        return None
    carries = {tuple(sorted(each.loop.carry.items())) for each in passes if each.loop is not None}
    carry = tuple((port, keyword(into)) for port, into in carries.pop())
    of_items = {port.name for port in single.ports if port.axis is None}
    fits = carry and not carries and of_items.issuperset(into for _, into in carry)
    fits = fits and len(passes) * single.item_tokens * iterations <= AHEAD_TOKENS
    return replace(single, iterations=iterations, carry=carry) if fits else None


def signature(planned: PassPlan, batch_key: Sequence[str]) -> tuple[object, ...]:
    """Return what passes must have in common to share a forward; () for ids.

    batch_key: the ports with one value per batch item whose shapes must agree; all of them if it is empty.
    """
    if planned.is_ids:
        return ()
    parts: list[tuple[object, ...]] = []
    for name, axis in sorted(planned.axes.items()):
        value = planned.ports[name]
        if name in planned.per_item:
            parts.append((name, value.dtype, value.shape if not batch_key or name in batch_key else None))
        elif axis is None:
            return ("alone", id(planned))
        else:
            parts.append((name, value.dtype, axis))
    return (*parts, planned.given.dim() if planned.given is not None else 0)


def shapes_of(ports: Mapping[str, Tensor]) -> tuple[object, ...]:
    """Return names, dtypes and shapes of a pass's ports."""
    return tuple([(name, value.dtype, value.shape) for name, value in ports.items()])


def _form(name: str, value: Tensor, axis: int | None, *, leads: bool, is_staged: bool) -> PortForm:
    """Return the form of an input. leads: whether the values of several tokens or items lie along an axis of it."""
    shape, at = tuple(value.shape), axis or 0
    return PortForm(name, value.dtype, axis, shape[:at] + shape[at + 1 :] if leads else shape, is_staged)


def _positions_form(planned: PassPlan) -> PortForm:
    if planned.given is not None:
        return _form(POSITIONS, planned.given, planned.given.dim() - 1, leads=True, is_staged=False)
    dtype = torch.float32 if isinstance(planned.position, float) else torch.int64
    return PortForm(POSITIONS, dtype, 0, (), is_staged=True)
