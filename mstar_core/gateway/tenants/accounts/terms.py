"""Terms of a tenant: its rights, quotas and weight. From `serve.yaml`, or from the store of tenants."""

from __future__ import annotations

from typing import Final

import msgspec

ANONYMOUS: Final = "anonymous"
"""The tenant of a gateway without tenants, and of requests without a key where none is required."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rights and limits of one tenant. A limit of None does not limit.

    models: that it may use, empty for all. concurrency: requests that run or wait at once. weight: its share of a model
    that others wait for too, relative to theirs. Minutes and days are those of UTC.
    """

    name: str
    models: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    audio_seconds_per_day: float | None = None
    concurrency: int | None = None
    weight: float = 1.0

    @property
    def is_limited(self) -> bool:
        """Whether a quota may refuse its requests."""
        limits = (self.requests_per_minute, self.tokens_per_day, self.audio_seconds_per_day, self.concurrency)
        return any(limit is not None for limit in limits)
