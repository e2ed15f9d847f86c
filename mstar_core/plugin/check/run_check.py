"""Comparison of a Run with its walk: its inputs, and the ports that it keeps or reads.

Used by the dry run of a plugin's programs and, once per walk and set of names, by the conductor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph import graph_nodes
from mstar_core.graph.check.graph_check import walk_inputs
from mstar_core.plugin.program import InputFact, Segment, Signal

if TYPE_CHECKING:
    from mstar_core.graph import PortType, Stream, Walk
    from mstar_core.plugin.program import Run


class RunCheck:
    """Checks the Runs of a model's programs. Owned by the conductor. Only Runs that pass are remembered."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = tuple(streams)
        self._inputs: dict[str, Mapping[str, PortType]] = {}
        self._passed: set[tuple[object, ...]] = set()

    def require(self, walk: Walk, run: Run) -> None:
        """Raise GraphError for an input that the walk lacks or that is missing, or for an unknown port."""
        key = (run.walk, tuple(run.inputs), run.keep, run.reads)
        if key in self._passed:
            return
        if run.walk not in self._inputs:
            self._inputs[run.walk] = walk_inputs(walk, self._streams)
        place = f"Run({run.walk!r})"
        check_inputs(self._inputs[run.walk], run, place)
        check_ports(walk, run, place)
        self._passed.add(key)


def check_inputs(ports: Mapping[str, PortType], run: Run, place: str) -> None:
    """Raise GraphError unless a Run gives the inputs of its walk. ports: see `walk_inputs`. place: for the error."""
    given: Mapping[str, Any] = run.inputs
    for name, value in given.items():
        if name not in ports:
            raise GraphError(f"{place} gives input {name!r}", hint=did_you_mean(name, ports), place=run.walk)
        if not isinstance(value, InputFact | Segment | Signal | tuple):
            raise GraphError(
                f"{place}: input {name!r} is a {type(value).__name__}",
                hint="pass a request input, a segment, a signal or a tuple of numbers",
                place=run.walk,
            )
        if isinstance(value, Segment) and name not in value.inputs and len(value.inputs) != 1:
            hint = did_you_mean(name, value.inputs)
            raise GraphError(
                f"{place}: segment {value.index} ({value.kind}) holds no {name!r}", hint=hint, place=run.walk
            )
    for name, port in ports.items():
        if name not in given and not port.optional:
            got = ", ".join(given) or "nothing"
            raise GraphError(
                f"{place} lacks input {name!r}",
                f"expected {name!r} as {port}; the program gives {got}",
                f"pass {name}=...",
                place=run.walk,
            )


def check_ports(walk: Walk, run: Run, place: str) -> None:
    """Raise GraphError for a port that a Run keeps or reads and no node of its walk has."""
    known = {port for use in graph_nodes(walk) for port in use.spec.ports}
    for verb, ports in (("keeps", run.keep), ("reads", run.reads)):
        for port in ports:
            if port not in known:
                raise GraphError(f"{place} {verb} port {port!r}", hint=did_you_mean(port, known), place=run.walk)
