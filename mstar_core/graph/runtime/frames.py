"""Open scopes and loop runs: the bookkeeping of one WalkState."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.graph.compile.compiled import CompiledLoop
from mstar_core.graph.runtime.actions import Iteration, Ref


class Pending(enum.Enum):
    """A value that is not known yet. None is a value that is known to be absent."""

    PENDING = "pending"


PENDING: Final = Pending.PENDING
Slot = Ref | Pending | None


@dataclass(slots=True, eq=False)
class Scope:
    """One open frame: the root, or one iteration of a loop.

    pending: parts that have not finished. waiting: task -> number of inputs to come. missing: tasks that lack a
    required input.
    """

    frame: int
    path: Iteration
    run: LoopRun | None
    pending: int = 0
    waiting: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, dict[str, Ref]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    loops: dict[int, LoopRun] = field(default_factory=dict)

    @property
    def loop_run(self) -> LoopRun:
        """Run of the loop that this scope is an iteration of."""
        assert self.run is not None, "only an iteration of a loop has one"
        return self.run


@dataclass(slots=True, eq=False)
class LoopRun:
    """One run of a loop inside an open scope.

    first: the iteration that it begins with, 0 unless saved values start it. index: the last opened iteration.
    allowed: iterations up to this one may open. end: (iterations, reason).
    values: for each carried port that this rank owns, the start of the next iteration. imports: values from outside.
    last: results of the last iteration. verdicts: iteration -> stop, keep or skip; -1 is the starting value.
    asked: an answer is due, from the stream or from the engine.
    """

    loop: CompiledLoop
    scope: Scope
    limit: int | None
    owned: Sequence[bool]
    imports: list[Slot]
    first: int = 0
    values: list[Slot] = field(init=False)
    last: list[Ref | None] = field(init=False)
    index: int = field(init=False)
    allowed: int = field(init=False)
    inner: Scope | None = None
    end: tuple[int, str] | None = None
    over: bool = False
    verdicts: dict[int, str] = field(default_factory=dict)
    chunk: Slot = PENDING
    asked: bool = False
    stream_ended: bool = False

    def __post_init__(self) -> None:
        self.index = self.allowed = self.first - 1
        self.values = [PENDING] * len(self.loop.variables)
        self.last = [None] * len(self.loop.results)

    def value_of(self, port: str) -> Slot:
        """Return the start of the next iteration for the carried input `port`."""
        for variable, value in zip(self.loop.variables, self.values, strict=True):
            if variable.port == port:
                return value
        return None

    def owned_values(self) -> list[Slot]:
        """Return the carried values that this rank owns."""
        return [value for value, owned in zip(self.values, self.owned, strict=True) if owned]

    def result(self, number: int) -> Ref | None:
        """Return result `number` of the loop."""
        result = self.loop.results[number]
        value = self.last[number] if result.variable is None else self.value_of(result.variable)
        return None if isinstance(value, Pending) else value
