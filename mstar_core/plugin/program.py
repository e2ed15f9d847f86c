"""Inputs and yields of a model's program. Programs are plain generators that the conductor drives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.graph.declare.nodes import MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFact:
    """Description of a named request input. Programs see shapes and dtypes, never tensors."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "any"

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One part of an interleaved prompt, in the order given. inputs: walk input name -> description of its tensor."""

    kind: str
    index: int
    length: int = 0
    is_last: bool = False
    inputs: Mapping[str, InputFact] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        return self.kind == "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """The request as programs see it. params: the model's own parameter dataclass. facts: see `Inputs.facts`.

    growing: names of inputs to which the client adds while the request runs, see `Receive`.
    """

    params: Any
    inputs: Mapping[str, InputFact] = field(default_factory=dict)
    segments: Sequence[Segment] = ()
    outputs: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    growing: frozenset[str] = frozenset()

    @property
    def generates_image(self) -> bool:
        return "image" in self.outputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Signal:
    """Handle of a value that a walk kept on a rank, usable as an input of a later Run.

    The value lives as long as the program holds the handle.
    """

    port: str
    key: int
    rank: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkResult:
    """Result of a walk. reason: `done`, `stop`, `length` or `ended`. counts: loop name -> iterations, port -> items.
    values: numbers of the ports that the Run reads, in C order.

    ended: a node outside loops takes an item of a stream, and the stream has ended without one. The node is skipped,
    and so are the later runs of the same list on its rank.
    """

    reason: str = "done"
    counts: Mapping[str, int] = field(default_factory=dict)
    signals: Mapping[str, Signal] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


Numbers = tuple[int, ...] | tuple[float, ...]
"""Input that the program itself gives: int64 [n] if all are integers, else float32 [n]."""

RunInput = InputFact | Segment | Signal | Numbers

MOST_READ: Final = 4096
"""Most numbers of a port that a Run reads."""


@dataclass(frozen=True, slots=True, init=False)
class Run:
    """Request of a program to run a walk.

    max_iters: limit of the walk's loop, or {loop: limit} if there are several; None: until the loop stops itself.
    branches: cache branches that take part.
    rows: candidates of this request. They share the branch's cache and each extends it with its own. Inputs have a
    first axis [rows, ...] or are the same for all; outputs are stacked. A later Run of one row extends the branch.
    row_tokens: tokens that each candidate keeps beside the shared ones if all exist at once. Admission then reserves
    rows * row_tokens. 0 reserves none, for example if an engine runs the candidates in turn and keeps nothing.
    row_passes: the same in forward passes, each of `Attend.tokens` tokens of the walk's KV node.
    sample: whether a prefill samples from its last position.
    keep: output ports of the walk's nodes whose last value is returned as a signal.
    reads: output ports whose numbers are returned, at most MOST_READ each. The sampled port of a loop gives all ids
    that the loop drew. Reading a value that is on a GPU waits for it, unless the module names it in `host_outputs`.
    sampling: sampling parameters that differ from the request's in this Run, such as `{"temperature": 0.2}`.
    inputs: walk input -> request input, segment, signal or numbers.
    finishes: the program ends after this Run. Its rank may then report the end to the client itself.
    """

    walk: str
    max_iters: int | Mapping[str, int] | None
    branches: tuple[str, ...]
    rows: int
    row_tokens: int
    row_passes: int
    sample: bool
    keep: tuple[str, ...]
    reads: tuple[str, ...]
    sampling: Mapping[str, float]
    inputs: Mapping[str, RunInput]
    finishes: bool

    def __init__(
        self,
        walk: str,
        *,
        max_iters: int | Mapping[str, int] | None = None,
        branches: Sequence[str] = (MAIN,),
        rows: int = 1,
        row_tokens: int = 0,
        row_passes: int = 0,
        sample: bool = True,
        keep: Sequence[str] = (),
        reads: Sequence[str] = (),
        sampling: Mapping[str, float] | None = None,
        finishes: bool = False,
        **inputs: RunInput,
    ) -> None:
        object.__setattr__(self, "walk", walk)
        object.__setattr__(self, "max_iters", max_iters)
        object.__setattr__(self, "branches", tuple(branches))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "row_tokens", row_tokens)
        object.__setattr__(self, "row_passes", row_passes)
        object.__setattr__(self, "sample", sample)
        object.__setattr__(self, "keep", tuple(keep))
        object.__setattr__(self, "reads", tuple(reads))
        object.__setattr__(self, "sampling", dict(sampling or {}))
        object.__setattr__(self, "inputs", dict(inputs))
        object.__setattr__(self, "finishes", finishes)


@dataclass(frozen=True, slots=True)
class Fork:
    """Make branch `into` a copy-on-write copy of `source`. It is sent with the next Run and has no result."""

    source: str
    into: str


@dataclass(frozen=True, slots=True, init=False)
class Reset(Fork):
    """Empty a cache branch: its next pass begins at position 0. It is sent with the next Run and has no result."""

    def __init__(self, branch: str = MAIN) -> None:
        object.__setattr__(self, "source", "")
        object.__setattr__(self, "into", branch)


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for more of an input that grows, one of `ProgramRequest.growing`.

    The answer is `Numbers` that a Run takes as an input: all that has arrived since the last answer, at least one. None
    follows once the client has ended the input. An attempt after the death of a process gets the same numbers, divided
    into other pieces, so results must not depend on the division.
    """

    name: str


Wish = Run | Fork | list[Run] | Receive
Answer = WalkResult | list[WalkResult] | Numbers | None
ProgramGenerator = Generator[Wish, Any, None]
Program = Callable[[ProgramRequest], ProgramGenerator]
