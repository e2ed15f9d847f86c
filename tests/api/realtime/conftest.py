"""A realtime connection for tests of single events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.api.conftest import running, started
from tests.api.realtime.client import RealtimeClient, conversing
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC

__all__ = ["live", "started"]


@pytest.fixture
async def live() -> AsyncIterator[RealtimeClient]:
    """Connect to an api of the omni fake that echoes."""
    async with running(echo, model=SPEC) as api, conversing(api) as client:
        yield client
