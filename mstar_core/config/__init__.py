"""Deployment files: their schema, loading with provenance, placement, explanation. No torch."""

from __future__ import annotations

from mstar_core.config.deployment import ApiConfig, DeploymentSpec, KVCacheConfig, NodePlacement, Plan, RankPlan
from mstar_core.config.load import ConfigFile, Target, find, read_file, read_text, shipped, split_name
from mstar_core.config.overrides import Override, parse_set
from mstar_core.config.placement import make_plan
from mstar_core.config.resolve import resolve, resolve_target
from mstar_core.config.resolved import NodeGroup, ResolvedConfig
from mstar_core.config.schema import SETTINGS, Setting, explain, json_schema
from mstar_core.config.show import commented_file, differences

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
    "commented_file",
    "differences",
    "explain",
    "find",
    "json_schema",
    "make_plan",
    "parse_set",
    "read_file",
    "read_text",
    "resolve",
    "resolve_target",
    "shipped",
    "split_name",
]
