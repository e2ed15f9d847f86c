"""Names of values and loop marks between ranks: (address, port, iteration).

A port at a loop's address is a carried input port, `=port` for a result of the loop, or a mark, which begins with `$`.
"""

from __future__ import annotations

from typing import Final

from mstar_core.graph.compile.compiled import CompiledWalk, Kind, Source
from mstar_core.graph.runtime.actions import Iteration

GO: Final = "$go"
"""Mark: the iteration may open."""
END: Final = "$end:"
"""Mark, followed by the reason: the loop ends before the iteration."""
VERDICT: Final = "$"
"""Mark, followed by stop, keep or skip: the stop rule's verdict on the iteration."""


def address_of(walk: CompiledWalk, source: Source) -> tuple[int, str]:
    """Return the address and port under which a value of `source` is sent."""
    if source.kind is Kind.LOOP:
        return walk.address(source.at), "=" + source.port
    if source.kind is Kind.VAR:
        return walk.address(source.at), source.port
    return source.at, source.port


def source_at(walk: CompiledWalk, address: int, port: str) -> Source:
    """Return the source of a received value; the inverse of `address_of`."""
    tasks = len(walk.tasks)
    if address < tasks:
        return Source(Kind.TASK, address, port)
    if port.startswith("="):
        return Source(Kind.LOOP, address - tasks, port[1:])
    return Source(Kind.VAR, address - tasks, port)


def saved_input(loop: str, port: str) -> str:
    """Return the name of the input that starts a carried port of a loop from a saved value. No port has a slash."""
    return f"{loop}/{port}"


def scope_of(walk: CompiledWalk, address: int, port: str, iteration: Iteration) -> tuple[int, Iteration]:
    """Return the frame of a received value or mark, and the path of its scope."""
    tasks = len(walk.tasks)
    if address < tasks:
        return walk.tasks[address].frame, iteration
    loop = address - tasks
    if port.startswith("$"):
        return walk.loops[loop].parent, iteration[:-1]
    return (walk.loops[loop].parent if port.startswith("=") else loop), iteration
