"""What a WalkState asks its caller to do, in order. Made by readiness, carried out by the worker."""

from __future__ import annotations

from typing import NamedTuple

from mstar_core.graph.spec.edges import Stream

Iteration = tuple[int, ...]
"""Loop indices, outermost first; () outside loops."""


class Key(NamedTuple):
    """Name of a value that the caller stores from the event (or Recall) that brings it until its Free.

    address: a task, or number of tasks + loop. port: an output port; a carried port, `=port` (handed out by a loop) or
    `$chunk` where the address is a loop's (or a bare stream input's task).
    """

    address: int
    port: str
    iteration: Iteration


class RunInput(NamedTuple):
    """The Run's input of that name; owned by whoever holds the Run."""

    name: str


class Held(NamedTuple):
    """What an output port of a node last held for this request (Hold). Only in FireLoop and AskStop."""

    node: str
    port: str


class Special(NamedTuple):
    """An input that the runtime fills in: STEP with its value, CHUNK_FIRST and CHUNK_LAST, `$param:name`."""

    name: str
    step: int


Ref = Key | RunInput | Held | Special
"""Where a value is to be found."""


class Fire(NamedTuple):
    """Run a task once, then call `done`. inputs: port -> where its value is; absent ports are left out.

    branches: cache branches that this firing covers; outputs are those of the first.
    """

    task: int
    iteration: Iteration
    inputs: dict[str, Ref]
    branches: tuple[str, ...]


class FireLoop(NamedTuple):
    """Run a resident loop as one job, then call `resident_done`. iteration: indices of the enclosing loops.

    inputs: what the body starts from. limit: most iterations (None: until it stops itself). start: the value that the
    stop rule is tested on before the first iteration, or None when there is none to test.
    """

    loop: int
    task: int
    iteration: Iteration
    inputs: dict[str, Ref]
    branches: tuple[str, ...]
    limit: int | None
    start: Ref | None


class AskStop(NamedTuple):
    """Test a loop's stop rule on its starting value, then call `tested`. A Held value that is not there is no stop."""

    loop: int
    iteration: Iteration
    value: Ref


class Want(NamedTuple):
    """Take the next chunk of a stream, then call `chunk`, or `stream_ended` when it is finished."""

    address: int
    stream: str
    iteration: Iteration


class Hold(NamedTuple):
    """Keep the value as what (node, port) last held, in place of the one before."""

    node: str
    port: str
    value: Key


class Recall(NamedTuple):
    """Store what (node, port) last held under `value`, from where it is freed like any other."""

    value: Key
    node: str
    port: str


class Emit(NamedTuple):
    """Send a value to the client."""

    value: Ref
    port: str
    modality: str | None
    iteration: Iteration


class ToStream(NamedTuple):
    """Put a value on a stream."""

    value: Ref
    stream: Stream
    iteration: Iteration


class Send(NamedTuple):
    """Tell another rank, which calls `arrived` with the same address, port and iteration.

    value: None when the port was not produced, and for marks of loops, whose port begins with `$`.
    """

    rank: int
    address: int
    port: str
    iteration: Iteration
    value: Ref | None


class Free(NamedTuple):
    """Nobody needs the value any more. Comes exactly once for each value that was brought in."""

    value: Key


class EndWalk(NamedTuple):
    """This rank's share is over. reason: done, stop, length or cancelled. counts: loop name -> iterations, added up."""

    reason: str
    counts: dict[str, int]


Action = Fire | FireLoop | AskStop | Want | Hold | Recall | Emit | ToStream | Send | Free | EndWalk
Actions = list[Action]
