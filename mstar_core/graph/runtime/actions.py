"""Actions that a WalkState asks its caller to carry out, in order, and the names of the values in them."""

from __future__ import annotations

from typing import NamedTuple

from mstar_core.graph.declare.streams import Stream

Iteration = tuple[int, ...]
"""Loop indices, outermost first; () outside loops."""


class Key(NamedTuple):
    """Name of a stored value, from the event (or Recall) that brings it until its Free.

    address: a task, or number of tasks + loop. port: an output port. At a loop's address it is a carried port, `=port`
    (a result of the loop) or `$chunk`; `$chunk` also names the chunk of a task that takes a stream outside a loop.
    """

    address: int
    port: str
    iteration: Iteration


class RunInput(NamedTuple):
    """The Run's input of that name; it lives as long as the Run."""

    name: str


class Held(NamedTuple):
    """Last value of a node's output port in this request (see Hold). Only in FireLoop and AskStop."""

    node: str
    port: str


class Special(NamedTuple):
    """An input that the runtime fills in: STEP with its value, RANDOM, CHUNK_FIRST, CHUNK_LAST or `$param:name`."""

    name: str
    step: int


Ref = Key | RunInput | Held | Special
"""Reference to a value."""


class Fire(NamedTuple):
    """Run a task once, then call `done`. inputs: references by port; absent ports are left out.

    branches: cache branches to run the task on; the outputs are those of the first.
    """

    task: int
    iteration: Iteration
    inputs: dict[str, Ref]
    branches: tuple[str, ...]


class FireLoop(NamedTuple):
    """Run an engine loop as one job, then call `loop_done`. iteration: indices of the enclosing loops.

    A loop over a stream takes its items from there while it runs; they are not among the inputs.

    inputs: starting values of the body. limit: maximum number of iterations, or None. start: the value to test the
    stop rule on before the first iteration, or None.
    """

    loop: int
    task: int
    iteration: Iteration
    inputs: dict[str, Ref]
    branches: tuple[str, ...]
    limit: int | None
    start: Ref | None


class AskStop(NamedTuple):
    """Test a loop's stop rule on its starting value, then call `tested`. A missing Held value does not stop."""

    loop: int
    iteration: Iteration
    value: Ref


class Want(NamedTuple):
    """Take the next chunk of a stream, then call `chunk`, or `stream_ended` when the stream is finished."""

    address: int
    stream: str
    iteration: Iteration


class Hold(NamedTuple):
    """Keep the value as the last one of (node, port) and drop the one before."""

    node: str
    port: str
    value: Key


class Recall(NamedTuple):
    """Store the last value of (node, port) under `value`; it is freed like any other."""

    value: Key
    node: str
    port: str


class Save(NamedTuple):
    """Save the carried values before an iteration, by input port, for a new attempt of the request."""

    loop: int
    iteration: int
    values: dict[str, Ref]


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
    """Send to another rank, which calls `arrived` with the same address, port and iteration.

    value: None when the port was not produced, and for marks of loops, whose port begins with `$`.
    """

    rank: int
    address: int
    port: str
    iteration: Iteration
    value: Ref | None


class Free(NamedTuple):
    """Drop a stored value. Issued exactly once for each."""

    value: Key


class EndWalk(NamedTuple):
    """This rank's share is over. reason: done, stop, length, ended or cancelled. counts: iterations by loop name.

    ended: a task outside loops takes a chunk of a stream that has ended without one, and was skipped.
    """

    reason: str
    counts: dict[str, int]


Action = Fire | FireLoop | AskStop | Want | Hold | Recall | Save | Emit | ToStream | Send | Free | EndWalk
Actions = list[Action]
