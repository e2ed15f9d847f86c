"""Kernels written in Triton's experimental half: taken where its release is the one that they were written for."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Final

import triton

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

GLUON: Final = "3.6."
"""The Triton whose experimental half these kernels are written in; it changes from release to release."""


@cache
def kernels(name: str, what: str) -> ModuleType | None:
    """The module of that name; none, which is said once, where another triton is installed.

    what: what takes slower kernels then, in the plural.
    """
    if triton.__version__.startswith(GLUON):
        return importlib.import_module(name)
    log.warning("%s take slower kernels: their own need triton %sx, this is %s", what, GLUON, triton.__version__)
    return None
