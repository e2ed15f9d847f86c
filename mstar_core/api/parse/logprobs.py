"""Log-probabilities that a request asks for, as a sampling parameter. Used by the routes that return text."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from mstar_core.api.parse.capabilities import LOGPROBS, check_capability
from mstar_core.errors import RequestError
from mstar_core.graph.declare.sampling import MOST_LOGPROBS
from mstar_core.plugin.spec import ModelSpec

P = TypeVar("P")


def chat_logprobs(spec: ModelSpec, top_logprobs: int | None, *, is_wanted: bool) -> int | None:
    """Return the alternatives to report with each token of a chat answer; None without log-probabilities.

    Raises RequestError if the model has none, and for `top_logprobs` without `logprobs` or above MOST_LOGPROBS.
    """
    if not is_wanted:
        if top_logprobs:
            raise RequestError("top_logprobs needs logprobs", hint="send logprobs: true too", field="top_logprobs")
        return None
    check_capability(spec, LOGPROBS, "logprobs")
    return checked_count(top_logprobs or 0, "top_logprobs")


def checked_count(count: int, field: str) -> int:
    """Return a number of alternatives. Raises RequestError outside 0 to MOST_LOGPROBS."""
    if not 0 <= count <= MOST_LOGPROBS:
        allowed = f"0 to {MOST_LOGPROBS}"
        raise RequestError(f"{field} is {count}, but must be {allowed}", field=field, value=count, allowed=allowed)
    return count


def with_logprobs(params: P, count: int | None) -> P:
    """Return a model's parameters with the alternatives to report with each token. count: None reports nothing."""
    return params if count is None else dataclasses.replace(params, logprobs=count)  # type: ignore[type-var]
