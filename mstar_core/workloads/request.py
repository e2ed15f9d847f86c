"""One request of a load test, and what a workload knows about the served model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request. files: name and content of each. outputs: modalities. params: of the model.

    at_s: intended time in seconds since the start, only in traces. id: the name of a trace's line.
    expected: properties that the output must have, such as `size` of an image or `shape` of an action chunk.
    """

    outputs: tuple[str, ...]
    text: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    at_s: float | None = None
    id: str | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The served model as a workload sees it. parameters: name -> JSON schema. is_tiny: a miniature is served.

    robot: sizes of a robot's requests: `state`, `cameras`, `horizon` and `action`; empty for other models.

    A server that publishes no schema has no parameters, and workloads then send none.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    max_model_len: int = 0
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_tiny: bool = False
    endpoints: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    robot: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ServedModel:
        """Build from one entry of `GET /v1/models`; entries of other servers have only an `id`."""
        return cls(
            name=str(facts["id"]),
            inputs=tuple(facts.get("input_modalities", ())),
            outputs=tuple(facts.get("output_modalities", ())),
            max_model_len=int(facts.get("max_model_len") or 0),
            parameters=facts.get("parameters", {}).get("properties", {}),
            is_tiny="notice" in facts,
            endpoints=tuple(facts.get("endpoints", ())),
            aliases=tuple(facts.get("aliases", ())),
            robot=facts.get("robot") or {},
        )

    def known(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return those parameters that the model has."""
        return {name: value for name, value in params.items() if name in self.parameters}


def numbered(seed: int) -> Iterator[random.Random]:
    """Yield one random generator per request, so that request N is the same however many are drawn."""
    return (random.Random(f"{seed}/{number}") for number in count())


def length(chance: random.Random, least: int, most: int) -> int:
    """Draw a log-normal length in [least, most]. Its median is the geometric mean of the limits."""
    low, high = math.log(least), math.log(most)
    drawn = chance.gauss((low + high) / 2, (high - low) / 4)  # the limits are two deviations from the median
    return round(math.exp(min(high, max(low, drawn))))
