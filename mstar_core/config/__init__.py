"""Deployment files: schema, loading with provenance, and placement. Imports no torch.

Names are imported on first use: `ps` and every child process need only the spec, and importing the loader and the
planner takes ten times as long.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar_core.config.deployment import ApiConfig, DeploymentSpec, KVCacheConfig, NodePlacement, Plan, RankPlan
    from mstar_core.config.load import ConfigFile, Target, find, read_file, read_text, shipped, split_name
    from mstar_core.config.overrides import Override, parse_set
    from mstar_core.config.placement import make_plan
    from mstar_core.config.resolution import resolve, resolve_target
    from mstar_core.config.resolved import NodeGroup, ResolvedConfig
    from mstar_core.config.schema import SETTINGS, Setting

_HOMES = {
    "SETTINGS": "schema",
    "ApiConfig": "deployment",
    "ConfigFile": "load",
    "DeploymentSpec": "deployment",
    "KVCacheConfig": "deployment",
    "NodeGroup": "resolved",
    "NodePlacement": "deployment",
    "Override": "overrides",
    "Plan": "deployment",
    "RankPlan": "deployment",
    "ResolvedConfig": "resolved",
    "Setting": "schema",
    "Target": "load",
    "find": "load",
    "make_plan": "placement",
    "parse_set": "overrides",
    "read_file": "load",
    "read_text": "load",
    "resolve": "resolution",
    "resolve_target": "resolution",
    "shipped": "load",
    "split_name": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "SETTINGS",
    "ApiConfig",
    "ConfigFile",
    "DeploymentSpec",
    "KVCacheConfig",
    "NodeGroup",
    "NodePlacement",
    "Override",
    "Plan",
    "RankPlan",
    "ResolvedConfig",
    "Setting",
    "Target",
    "find",
    "make_plan",
    "parse_set",
    "read_file",
    "read_text",
    "resolve",
    "resolve_target",
    "shipped",
    "split_name",
]
