"""The one model that a deployment serves, as every child of it loads it: that plugin alone, bound to its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar_core.errors import PluginError, did_you_mean
from mstar_core.plugin.loader import load_plugin
from mstar_core.plugin.spec import ModelSpec


def served_model(plugin: str, model: str) -> ModelSpec:
    """The model called `model` of the plugin called `plugin`. Raises PluginError."""
    models = {spec.name: spec for spec in load_plugin(plugin)}
    if model not in models:
        raise PluginError(
            f"plugin {plugin!r} offers no model {model!r}", hint=did_you_mean(model, models), plugin=plugin
        )
    return models[model]


def bound_model(plugin: str, model: str, folder: str | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """The served model adapted to its checkpoint folder and the deployment's model_kwargs."""
    return served_model(plugin, model).bound(Path(folder) if folder else None, model_kwargs)
