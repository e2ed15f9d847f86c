"""Import of kernels written in Gluon, Triton's experimental dialect, which changes from release to release."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Final

import triton

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

RELEASE: Final = "3.6."
"""The Triton release that the Gluon kernels are written for."""


@cache
def gluon_kernels(module: str, users: str) -> ModuleType | None:
    """Import a module of Gluon kernels. Log once and return None if another Triton release is installed.

    users: plural, for the log line: what then uses slower kernels.
    """
    if triton.__version__.startswith(RELEASE):
        return importlib.import_module(module)
    log.warning("%s use slower kernels: the fast ones need triton %sx, not %s", users, RELEASE, triton.__version__)
    return None
