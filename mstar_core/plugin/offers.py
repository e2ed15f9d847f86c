"""What hooks besides `mstar_models` take and give: plain data, lazy targets. Made by plugins, read by Plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mstar_core.config.resolved import ResolvedConfig

FetchProgress = Callable[[int, int, str], None]
"""Called with (bytes so far, total bytes, file name) while weights are fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a planner starts from: the checked configuration and the devices, entry i for rank i."""

    config: ResolvedConfig
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """A further way to move tensors. target: "pkg.mod:Class", imported in the workers that use it."""

    name: str
    target: str
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A load to measure a model with. target: "pkg.mod:function" that yields requests; options are its keywords."""

    name: str
    title: str
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding of `mstarctl doctor`. hint: what to try when it is not ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEvent:
    """Something that happened in a deployment's life (`rank.ready`, `kv.preempt`). time_s: seconds since the epoch."""

    type: str
    time_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
