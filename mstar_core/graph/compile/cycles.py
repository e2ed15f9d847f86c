"""Finds parts of a walk that wait for each other and would never run. Called by wiring on what it has just built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from mstar_core.graph.compile.compiled import CompiledWalk, Kind, Source

Part = tuple[Kind, int]
"""A task or a loop, by its index."""
PARTS: Final = (Kind.TASK, Kind.LOOP)


def find_circle(walk: CompiledWalk) -> list[str]:
    """Names on the way into the first circle of one frame, the circle included; empty when there is none."""
    needs = _needs(walk)
    done: set[Part] = set()
    for first in needs:
        trail = [first]
        open_needs: list[Iterator[Part]] = [iter(needs[first])]
        while trail:
            part = next((part for part in open_needs[-1] if part not in done), None)
            if part is None:
                done.add(trail.pop())
                open_needs.pop()
            elif part in trail:
                return [_name(walk, one) for one in trail]
            else:
                trail.append(part)
                open_needs.append(iter(needs[part]))
    return []


def _needs(walk: CompiledWalk) -> Mapping[Part, Sequence[Part]]:
    """What each part waits for before it can begin, the way back of carried ports left out."""
    sources: dict[Part, list[Source]] = {}
    for task in walk.tasks:
        sources[Kind.TASK, task.index] = [entry.source for entry in task.inputs]
    for loop in walk.loops:
        sources[Kind.LOOP, loop.index] = [*loop.imports, *(variable.start for variable in loop.variables)]
    return {part: [(s.kind, s.at) for s in found if s.kind in PARTS] for part, found in sources.items()}


def _name(walk: CompiledWalk, part: Part) -> str:
    kind, index = part
    return walk.tasks[index].name if kind is Kind.TASK else walk.loops[index].name
