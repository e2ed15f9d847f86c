"""Open scopes and loop runs: the bookkeeping of one WalkState."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from mstar_core.graph.compile.compiled import CompiledLoop
from mstar_core.graph.runtime.actions import Iteration, Ref


class Pending(enum.Enum):
    """A value that is not known yet. None is a value that is known to be absent."""

    PENDING = "pending"


PENDING: Final = Pending.PENDING
Slot = Ref | Pending | None


class Scope:
    """One open frame: the root, or one iteration of a loop.

    pending: parts that have not finished. waiting: task -> number of inputs to come. missing: tasks that lack a
    required input.
    """

    __slots__ = ("frame", "inputs", "loops", "missing", "path", "pending", "run", "waiting")

    def __init__(self, frame: int, path: Iteration, run: LoopRun | None) -> None:
        self.frame = frame
        self.path = path
        self.run = run
        self.pending = 0
        self.waiting: dict[int, int] = {}
        self.inputs: dict[int, dict[str, Ref]] = {}
        self.missing: set[int] = set()
        self.loops: dict[int, LoopRun] = {}

    @property
    def loop_run(self) -> LoopRun:
        """The loop whose iteration this scope is."""
        assert self.run is not None, "only an iteration of a loop has one"
        return self.run


class LoopRun:
    """One run of a loop inside an open scope.

    index: the last opened iteration. allowed: iterations up to this one may open. end: (iterations, reason).
    values: for each carried port that this rank owns, the start of the next iteration. imports: values from outside.
    last: results of the last iteration. verdicts: iteration -> stop, keep or skip; -1 is the starting value.
    asked: an answer is due, from the stream or from the engine.
    """

    __slots__ = (
        "allowed",
        "asked",
        "chunk",
        "end",
        "imports",
        "index",
        "inner",
        "last",
        "limit",
        "loop",
        "over",
        "owned",
        "scope",
        "stream_ended",
        "values",
        "verdicts",
    )

    def __init__(
        self, loop: CompiledLoop, scope: Scope, limit: int | None, owned: Sequence[bool], imports: list[Slot]
    ) -> None:
        self.loop = loop
        self.scope = scope
        self.limit = limit
        self.owned = owned
        self.imports = imports
        self.values: list[Slot] = [PENDING] * len(loop.variables)
        self.last: list[Ref | None] = [None] * len(loop.results)
        self.index = -1
        self.allowed = -1
        self.inner: Scope | None = None
        self.end: tuple[int, str] | None = None
        self.over = False
        self.verdicts: dict[int, str] = {}
        self.chunk: Slot = PENDING
        self.asked = False
        self.stream_ended = False

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
