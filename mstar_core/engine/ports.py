"""How graph input names become keywords of a module's forward. Used by both engines."""

from __future__ import annotations

import inspect

from mstar_core.graph.spec.nodes import PARAM_PREFIX


def keyword(name: str) -> str:
    """`$step` -> `step`, `$first` -> `first`, `$param:scale` -> `scale`; other names stay."""
    return name.removeprefix(PARAM_PREFIX).removeprefix("$")


def takes(module: object, name: str) -> bool:
    """Whether a module's forward has a keyword of this name (or takes any)."""
    forward = getattr(module, "forward", module)
    assert callable(forward)
    parameters = inspect.signature(forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def names(module: object, name: str) -> bool:
    """Whether a module's forward names this keyword itself."""
    forward = getattr(module, "forward", module)
    assert callable(forward)
    return name in inspect.signature(forward).parameters
