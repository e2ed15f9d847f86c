"""Detection of tasks and loops that wait for each other and would never run. Called by wiring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final

from mstar_core.graph.compile.compiled import CompiledWalk, Kind, Source

Part = tuple[Kind, int]
"""A task or a loop, by its index."""
PARTS: Final = (Kind.TASK, Kind.LOOP)


def find_cycle(walk: CompiledWalk) -> list[str]:
    """Return the names on a cycle, each before those that wait for it; empty without one."""
    try:
        TopologicalSorter(_needs(walk)).prepare()
    except CycleError as error:
        return [_name(walk, part) for part in error.args[1][:-1]]
    return []


def _needs(walk: CompiledWalk) -> Mapping[Part, Sequence[Part]]:
    """Return the parts that each part waits for, without the way back of carried ports."""
    sources: dict[Part, list[Source]] = {}
    for task in walk.tasks:
        sources[Kind.TASK, task.index] = [entry.source for entry in task.inputs]
    for loop in walk.loops:
        sources[Kind.LOOP, loop.index] = [*loop.imports, *(variable.start for variable in loop.variables)]
    return {part: [(s.kind, s.at) for s in found if s.kind in PARTS] for part, found in sources.items()}


def _name(walk: CompiledWalk, part: Part) -> str:
    kind, index = part
    return walk.tasks[index].name if kind is Kind.TASK else walk.loops[index].name
