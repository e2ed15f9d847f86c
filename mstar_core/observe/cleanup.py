"""Clean-up that cannot raise: each step is tried, whatever became of the one before. Used by worker and conductor."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def attempt(step: Callable[..., object], *arguments: object) -> None:
    """Call it for its effect. An error is logged with its step and goes no further.

    The isolation boundary of an end: what one request leaves behind may cost a log line, never its neighbours.
    """
    try:
        step(*arguments)
    except Exception:
        name = getattr(step, "__qualname__", None) or repr(step)
        log.exception("a step of a clean-up failed, the others go on: %s", name)
