"""Plan of one step of a KV node: what the runner computes, complete and immutable.

Made by the scheduler, executed by the runner, and published to the followers of a tensor-parallel group, which execute
it with the same runner. A test can write one by hand. No record names a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from mstar_core.engine.steps.masks import Masks
from mstar_core.engine.steps.updates import Update
from mstar_core.graph.declare.nodes import Attend
from mstar_core.graph.declare.sampling import SamplingParams

Position = int | float
"""Position of a token; a float at nodes whose `positions` port is one."""


class DecodeBatch(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Sequences in resident loops, one token per step. The same object in every step until its membership changes.

    version: grows with each change; a runner keeps what it has uploaded for a version. slots: int64 [n]. sampling: of
    each sequence; adjusts: whether one of them adjusts logits; scores: whether one reports log-probabilities.
    mask_rows: int32 [n], the place of each sequence among the constrained ones, -1 for one without a grammar; None if
    no sequence has one. reports: ports other than the id that the loops emit;
    to_host: those copied to the host. adapters: int64 [n], rows of LoRA adapters, -1 for a sequence without one; None
    if no sequence has one. memory: int64 [2, n], slot and tokens of the memory of each; None at a node without memory.
    """

    version: int
    slots: np.ndarray
    sampling: tuple[SamplingParams, ...]
    adjusts: bool = False
    scores: bool = False
    mask_rows: np.ndarray | None = None
    reports: frozenset[str] = frozenset()
    to_host: frozenset[str] = frozenset()
    adapters: np.ndarray | None = None
    memory: np.ndarray | None = None


class DecodePlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One token of each sequence of a decode batch, or several in a row, each drawn behind the one before.

    lengths: int64 [n], tokens in the cache before. positions: int64 or float32 [n]. drawn: int64 [n], ids drawn
    before, which number the random numbers. items: int64 [n], the next item of each loop's stream; None without one.
    forced: int64 [n], known ids to take instead of those drawn, -1 for none; only of batches with scores.
    masks: of the constrained sequences, see DecodeBatch; read them as late as possible.
    steps: tokens of each sequence. left: int64 [n], iterations left before the first of them, only with several: the
    runner stops a sequence behind its last one. Several need no items, forced ids or masks.
    """

    batch: DecodeBatch
    lengths: np.ndarray
    positions: np.ndarray
    drawn: np.ndarray
    items: np.ndarray | None = None
    forced: np.ndarray | None = None
    masks: Masks | None = None
    steps: int = 1
    left: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.batch.slots)

    def each(self) -> Iterator[DecodePlan]:
        """Yield the plans of its tokens, one token of each sequence in each."""
        if self.steps == 1:
            yield self
            return
        for step in range(self.steps):
            yield msgspec.structs.replace(
                self,
                lengths=self.lengths + step,
                positions=self.positions + self.positions.dtype.type(step),
                drawn=self.drawn + step,
                steps=1,
                left=None,
            )

    def ended_by(self, step: int) -> np.ndarray:
        """Return the slots whose last iteration is the token `step`, counted from 0, if others follow: int64 [m]."""
        if self.left is None or step + 1 == self.steps:
            return self.batch.slots[:0]
        ended: np.ndarray = self.batch.slots[self.left == step + 1]
        return ended

    @property
    def variant(self) -> tuple[bool, bool]:
        """Whether a draw of it adjusts logits, and whether one has a mask: captured steps have a variant of each."""
        return self.batch.adjusts, self.masks is not None


class LoopPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Facts that captured steps need of the loop of a pass. iteration: of this pass, of at most `limit`.

    carry: output port -> input port. ends_early: whether a stop rule may end it before its limit. lists: inputs with
    one entry per iteration. ahead: the most iterations that one replay may compute.
    """

    is_fused: bool
    emits: bool
    ends_early: bool
    carry: dict[str, str]
    iteration: int
    limit: int
    lists: dict[str, Tensor] = {}
    ahead: int = 1


class PassPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Part or all of one pass of a sequence through the module.

    slot: the sequence's place in the arrays and page tables. cached: tokens in its cache before. count: tokens of this
    part; is_whole: whether the pass has no others. ports: the module's inputs by keyword, cut to this part; axes: the
    axis along which each is cut with the tokens (None: never cut). per_item: ports with one value per batch item,
    which are stacked with those of other passes. iterations: iterations of a loop in this pass, consecutive in the
    cache; each is a batch item of its own, and has an entry on the first axis of the ports in per_item if there are
    several. position: of the first token; given: positions from a port instead, tokens on the last axis.
    is_ids: the pass consists of ids alone, which stay on the host until its step. is_replay: recomputes a cache.
    wants: ports whose values are returned. keeps: whether rows of the attached ports are kept, see Attachment.
    sampling: how an id is drawn from the last token, None: none is drawn;
    drawn: ids drawn before. forced: a known id to take instead, whose log-probability is reported; -1 for none.
    mask: int32 [words], a bit for each id that may be drawn; None: all may.
    loop: None outside loops. adapter: row of its LoRA adapter, -1 without one.
    memory: slot and tokens of the memory that it reads, None without one.
    """

    slot: int
    cached: int
    count: int
    ports: dict[str, Tensor]
    axes: dict[str, int | None]
    attend: Attend
    position: Position
    given: Tensor | None = None
    is_whole: bool = True
    is_ids: bool = False
    is_replay: bool = False
    per_item: frozenset[str] = frozenset()
    iterations: int = 1
    wants: frozenset[str] = frozenset()
    keeps: bool = False
    sampling: SamplingParams | None = None
    drawn: int = 0
    forced: int = -1
    mask: np.ndarray | None = None
    loop: LoopPlan | None = None
    adapter: int = -1
    memory: tuple[int, int] | None = None

    @property
    def adjusts(self) -> bool:
        """Whether its draw adjusts logits."""
        return self.sampling is not None and self.sampling.adjusts

    @property
    def item_tokens(self) -> int:
        """Tokens of each batch item."""
        return self.count // self.iterations

    @property
    def next_position(self) -> Position:
        """Position after this part; not for given positions."""
        return self.position + (self.iterations if self.attend.positions == "shared" else self.count)

    def items(self, port: str) -> Any:
        """Return a port's value for each batch item."""
        return self.ports[port].unbind(0) if self.iterations > 1 else (self.ports[port],)


class StepPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One step: changes of device state in order, then one token of each decoding sequence, and passes.

    tables: int32 [slots, max_pages], the resident page tables, whose entries of these sequences stay as they are until
    the step is launched.
    """

    tables: np.ndarray
    updates: tuple[Update, ...] = ()
    decode: DecodePlan | None = None
    passes: tuple[PassPlan, ...] = ()
