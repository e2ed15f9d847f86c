"""Loop over one node that its engine iterates: carried values, limit, stop rule, emissions and end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from mstar_core.engine.base import Done, Emission
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job, LoopSpec

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class EngineLoop:
    """A loop in progress. carried: input port -> value of the next iteration. limit: most iterations."""

    job: Job
    spec: LoopSpec
    limit: int
    carried: dict[str, Tensor] = field(default_factory=dict)
    iteration: int = 0

    @property
    def values(self) -> dict[str, Tensor]:
        """Current value of each carried output port."""
        return {port: self.carried[into] for port, into in self.spec.carry.items()}

    def end_at_start(self) -> Done | None:
        """Return its end if the starting value stops it or it may not iterate."""
        values = self.values
        is_stopped = self._is_stopped(values)
        return self._ended(values, is_stopped=is_stopped) if is_stopped or self.limit <= 0 else None

    def advance(self, outputs: Mapping[str, Tensor], node: str) -> tuple[Emission | None, Done | None]:
        """Finish an iteration with the node's outputs. Returns what it emits, and the loop's end if this was its last.

        Raises EngineError if the node did not give a carried port.
        """
        spec, emission = self.spec, None
        if not spec.carry.keys() <= outputs.keys():
            missing = min(spec.carry.keys() - outputs.keys())
            raise EngineError(f"node {node} did not give {missing!r}", "its loop carries that port", node=node)
        if spec.emit:
            values = {port: outputs[port] for port in spec.emit if port in outputs}
            emission = Emission(job=self.job, iteration=self.iteration, outputs=values)
        self.iteration += 1
        self.carried = {into: outputs[port] for port, into in spec.carry.items()}
        is_stopped = self._is_stopped(outputs)
        if is_stopped or self.iteration >= self.limit:
            return emission, self._ended(outputs, is_stopped=is_stopped)
        return emission, None

    def _is_stopped(self, values: Mapping[str, Tensor]) -> bool:
        port = self.spec.stop_port
        return port is not None and port in values and stops(self.spec, values[port])

    def _ended(self, outputs: Mapping[str, Tensor], *, is_stopped: bool) -> Done:
        kept = {port: outputs[port] for port in self.job.outputs if port in outputs}
        return Done(job=self.job, outputs=kept, reason="stop" if is_stopped else "length", iterations=self.iteration)


def starting_values(
    spec: LoopSpec,
    inputs: Mapping[str, Value],
    last: Mapping[str, Tensor],
    place: Callable[[str, Value | Tensor], Tensor],
    node: str,
) -> dict[str, Tensor]:
    """Return input port -> starting value: the job's own, else the carried port's last. Raises EngineError.

    place: returns a value where the loop's iterations take that input port.
    """
    values: dict[str, Tensor] = {}
    for port, into in spec.carry.items():
        value = inputs.get(into, last.get(port))
        if value is None:
            raise no_start(node, port)
        values[into] = place(into, value)
    return values


def stops(spec: LoopSpec, value: Tensor) -> bool:
    """Return whether a value of the stop port ends the loop: one of the stop ids, or true."""
    return holds_id(value, spec.stop_ids) if spec.stop_ids else bool(value.any())


def holds_id(value: Tensor, ids: Collection[int]) -> bool:
    """Return whether any item of a value is one of these ids."""
    return any(int(item) in ids for item in value.reshape(-1).tolist())


def no_start(node: str, port: str) -> EngineError:
    """Return the error of a loop without a starting value."""
    return EngineError(
        f"a loop of node {node} has nothing to start from",
        f"port {port!r} has neither an input nor an earlier value",
        node=node,
    )
