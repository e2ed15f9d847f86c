"""Arguments and results of the hooks besides `mstar_models`: plain data and lazy targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mstar_core.config.resolved import ResolvedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Input of a planner: the checked configuration and the devices, entry i for rank i."""

    config: ResolvedConfig
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A load-test workload. options: keyword arguments of its function.

    target: "pkg.mod:function", called as function(card: ServedModel, seed: int, **options). It yields a
    `WorkloadRequest` for each request, without end (`mstar_core.workloads`).
    """

    name: str
    title: str
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding of `mstarctl doctor`. hint: the remedy if the state is not ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    detail: str = ""
    hint: str = ""
