"""What passes of loops must agree in to share a captured graph. Used by the pass graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mstar_core.engine.jobs import keyword
from mstar_core.engine.transfers import SMALL_BYTES
from mstar_core.graph.spec.nodes import STEP

if TYPE_CHECKING:
    import torch

    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.engine.kv.sequence import ForwardPass

MOST_ITERATIONS: Final = 64
"""Iterations of a loop that one graph holds at most; a longer one runs plainly."""

MOST_BYTES: Final = 256 << 20
"""Bytes of one bucket's inputs: passes that bring whole clips for each row are captured for few rows."""

AHEAD: Final = (5, 2)
"""Iterations of a loop that appends in one replay, where it may run ahead: who is told, or comes, waits for no more."""

AHEAD_TOKENS: Final = 2600
"""Tokens of such a replay at most: with more, an iteration takes long enough for what lies between two not to show."""

STEP_PORT: Final = keyword(STEP)
"""The number of an iteration, as modules take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An input in fixed shape. shape: of one row's value, or of one token's where it is not per row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_per_row: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize * math.prod(self.shape)

    def count(self, rows: int, tokens: int) -> int:
        """Values of so many rows, of so many tokens each."""
        return rows if self.is_per_row else rows * tokens

    def is_small(self, tokens: int) -> bool:
        """Whether it may travel with other small inputs: a row's values stay on the host until a step takes them."""
        return self.size_bytes * self.count(1, tokens) <= SMALL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """What passes must agree in to share a graph. tokens: of each row. carry: output -> input, as keywords.

    is_silent: whether nothing but what they append is wanted.
    """

    tokens: int
    ports: tuple[Port, ...]
    writes: bool
    iterations: int = 1
    carry: tuple[tuple[str, str], ...] = ()
    is_silent: bool = False

    def __hash__(self) -> int:
        """Few of what differs: it is asked for several times a replay, and all ports would take as long as the rest."""
        return hash((self.tokens, self.writes, self.iterations, len(self.ports)))

    @property
    def runs_ahead(self) -> bool:
        """Whether it is several iterations that each append behind the one before."""
        return self.writes and self.iterations > 1

    @property
    def carried(self) -> frozenset[str]:
        """Inputs that all iterations but the first take from the one before."""
        return frozenset(into for _, into in self.carry)

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """Of these numbers of rows, those for which it is worth a graph: the smallest, and others not too large."""
        if self.runs_ahead:
            return [count for count in rows if count * self.tokens * self.iterations <= AHEAD_TOKENS]
        each = sum(port.size_bytes * port.count(1, self.tokens) for port in self.ports)
        return [count for count in rows if count * each <= MOST_BYTES or count == min(rows)]

    def __str__(self) -> str:
        often = f", {self.iterations} iterations" if self.iterations > 1 else ""
        return f"{self.tokens} tokens {'appended' if self.writes else 'beside the cache'}{often}"


def is_graphable(piece: ScheduledChunk) -> bool:
    """Whether this is one pass of a loop, whole and unmasked."""
    firing = piece.forward
    if firing.is_ids or firing.is_replay or firing.given is not None or piece.samples or piece.count != firing.tokens:
        return False
    if isinstance(firing.position, float):  # the buffers hold whole positions
        return False
    return firing.attend.mask == "full" and is_of_loop(piece)


def one_pass(firing: ForwardPass, *, is_wanted: bool) -> PassKind | None:
    """What graphs of such passes agree in; None where an input is neither per token nor per row.

    is_wanted: whether somebody wants what they give.
    """
    ports = []
    for name in sorted(firing.ports):
        value, is_per_row = firing.ports[name], name in firing.per_row
        if not is_per_row and (firing.axes[name] != 0 or value.shape[0] != firing.tokens):
            return None
        leads = not is_per_row or firing.iterations > 1
        shape = tuple(value.shape[1:]) if leads else tuple(value.shape)
        ports.append(Port(name=name, dtype=value.dtype, shape=shape, is_per_row=is_per_row))
    writes = firing.attend.write
    return PassKind(tokens=firing.row_tokens, ports=tuple(ports), writes=writes, is_silent=writes and not is_wanted)


def is_of_loop(piece: ScheduledChunk) -> bool:
    """Whether a pass is an iteration of a loop, this engine's or the worker's: others come in too many lengths."""
    return piece.job is not None and (piece.job.loop is not None or STEP_PORT in piece.forward.ports)


def whole_loop(piece: ScheduledChunk, one: PassKind) -> PassKind | None:
    """All iterations of a loop that reads: from its first, where nothing can end it before its last."""
    loop, state = piece.job.loop if piece.job is not None else None, piece.branch.loop
    if loop is None or state is None or loop.stop_port is not None or state.iteration:
        return None
    carry = tuple((port, keyword(into)) for port, into in sorted(loop.carry.items()))
    if not 1 <= state.limit <= MOST_ITERATIONS or any(into not in piece.forward.ports for _, into in carry):
        return None
    return replace(one, iterations=state.limit, carry=carry)


def passes_ahead(pieces: Sequence[ScheduledChunk], one: PassKind) -> PassKind | None:
    """Several iterations of the loops of these pieces, whose kind is `one`, where all of them may run ahead."""
    iterations = min(piece.ahead for piece in pieces)
    if not one.writes or iterations == 1:
        return None
    carries = {tuple(sorted(piece.job.loop.carry.items())) for piece in pieces if piece.job and piece.job.loop}
    carry = tuple((port, keyword(into)) for port, into in carries.pop())
    of_rows = {port.name for port in one.ports if port.is_per_row}
    fits = carry and not carries and of_rows.issuperset(into for _, into in carry)
    return replace(one, iterations=iterations, carry=carry) if fits else None


def later(piece: ScheduledChunk, ahead: int) -> ForwardPass:
    """The pass that the loop of a piece comes to so many iterations behind it, apart from what it is carried."""
    firing, loop = piece.forward, piece.branch.loop_state
    apart, found = firing.next_position - firing.position, firing.bare()
    found.position += ahead * apart
    at = loop.iteration + ahead
    found.ports = firing.ports | {name: value[at : at + 1] for name, value in loop.lists.items()}
    if STEP_PORT in found.ports:
        found.ports[STEP_PORT] = found.ports[STEP_PORT] + ahead
    return found
