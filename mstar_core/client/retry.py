"""When a request is sent again: only what surely never started. Used by both kinds of HTTP."""

from __future__ import annotations

from typing import Final

from mstar_core.client.failure import MStarError

FIRST_S: Final = 0.5
LONGEST_S: Final = 8.0


def wait_s(error: MStarError, attempt: int, retries: int) -> float | None:
    """Seconds to wait before attempt number `attempt` + 1 (from 0); None: do not send it again.

    A server that says when to come back is taken at its word; otherwise the wait doubles from half a second.
    """
    if attempt >= retries or not error.has_not_started:
        return None
    if error.retry_after is not None:
        return error.retry_after
    return float(min(LONGEST_S, FIRST_S * 2**attempt))
