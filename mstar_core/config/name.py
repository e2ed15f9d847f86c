"""Rule of a deployment's name, which is part of paths, commands and labels."""

from __future__ import annotations

import re
from typing import Final

from mstar_core.errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAME_HINT: Final = "at most 64 letters, digits and '.', '_', '-', beginning with a letter or digit"


def is_name(name: str) -> bool:
    """Return whether a deployment can have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return `name` if it can name a deployment. Raises ConfigError."""
    if not is_name(name):
        raise ConfigError(f"{name!r} cannot name a deployment", hint=NAME_HINT, key="name")
    return name
