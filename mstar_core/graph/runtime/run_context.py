"""Constants of one run of a walk on one rank: its share, loop limits, inputs and cache branches.

Made by WalkState when a run begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.compile.compiled import CompiledWalk
from mstar_core.graph.compile.cut import RankWalk
from mstar_core.graph.declare.nodes import KV_CACHE

MaxIters = int | Mapping[str, int] | None


class RunContext(NamedTuple):
    """limits: maximum iterations of each loop. given: names of the Run's inputs. branches: see `branches_of`.

    firsts: iteration that a loop begins with instead of 0, by its name.
    """

    share: RankWalk
    limits: Sequence[int | None]
    given: frozenset[str]
    branches: Sequence[tuple[str, ...] | None]
    firsts: Mapping[str, int]


def loop_limits(walk: CompiledWalk, max_iters: MaxIters) -> list[int | None]:
    """Return the limit of each loop of a walk. Raises GraphError for unknown loops and for a loop without an end."""
    names = [loop.name for loop in walk.loops]
    if max_iters is None or isinstance(max_iters, int):
        if isinstance(max_iters, int) and len(names) > 1:
            written = ", ".join(f"{name!r}: ..." for name in names)
            raise GraphError(
                f"walk {walk.name!r} has {len(names)} loops, so one max_iters is not enough",
                hint=f"write max_iters={{{written}}}",
                place=walk.name,
            )
        limits: list[int | None] = [max_iters] * len(names)
    else:
        for name in max_iters:
            if name not in names:
                hint = did_you_mean(name, names)
                raise GraphError(f"walk {walk.name!r} has no loop {name!r}", hint=hint, place=walk.name)
        limits = [max_iters.get(name) for name in names]
    for loop, limit in zip(walk.loops, limits, strict=True):
        if limit is None and loop.loop.stop is None and loop.loop.over is None:
            raise GraphError(
                f"loop {loop.name!r} of walk {walk.name!r} has neither a limit nor a stop rule",
                hint="give the Run max_iters",
                place=loop.name,
            )
    return [None if limit is None else max(limit, 0) for limit in limits]


def first_iterations(walk: CompiledWalk, limits: Sequence[int | None], firsts: Mapping[str, int]) -> Mapping[str, int]:
    """Return the iterations that loops begin with, by name, of those that save and have iterations left."""
    if not firsts:
        return firsts
    names = (
        loop.name
        for loop, limit in zip(walk.loops, limits, strict=True)
        if loop.loop.save_every and 0 < firsts.get(loop.name, 0) and (limit is None or firsts[loop.name] < limit)
    )
    return {name: firsts[name] for name in names}


def branches_of(walk: CompiledWalk, branches: tuple[str, ...]) -> tuple[tuple[str, ...] | None, ...]:
    """Return the cache branches that each task runs on; None for a task whose branch is not part of the run."""
    apart = {task.node.spec.branch for task in walk.tasks if task.node.spec.of is not None}
    groups: list[tuple[str, ...] | None] = []
    for task in walk.tasks:
        spec = task.node.spec
        if spec.of is not None:
            groups.append((spec.branch,) if spec.branch in branches else None)
        elif spec.engine is KV_CACHE:
            groups.append(tuple(branch for branch in branches if branch not in apart) or None)
        else:
            groups.append(())
    return tuple(groups)
