"""Hooks that a plugin may implement. `mstarctl.plugins` calls them; each has a section in docs/plugins.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pluggy

from mstar_core.plugin.offers import Check, PlanRequest, WorkloadSpec
from mstar_core.plugin.spec import ModelSpec

if TYPE_CHECKING:
    from mstar_core.config.deployment import Plan

PROJECT: Final = "mstar"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mstar_models() -> Sequence[ModelSpec]:  # type: ignore[empty-body]
    """Give the models that this plugin serves. Called once when the plugin is loaded, in any process; pure and fast.

    Since plugin API 1.
    """


@hookspec(firstresult=True)
def mstar_plan(model: ModelSpec, request: PlanRequest) -> Plan | None:
    """Place the model's nodes on ranks, or give None for the default planner. The first answer counts.

    Since plugin API 1.
    """


@hookspec
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:  # type: ignore[empty-body]
    """Offer loads for load tests of this model; none for a model that is not the plugin's own.

    Since plugin API 1.
    """


@hookspec
def mstar_doctor() -> Sequence[Check]:  # type: ignore[empty-body]
    """Look at the host and report findings for `mstarctl doctor`. Quick; changes nothing.

    Since plugin API 1.
    """


HOOKS: Final = (
    mstar_models,
    mstar_plan,
    mstar_workloads,
    mstar_doctor,
)
