"""What every test of the clients uses: an api with a model of every modality, and a thread to speak to it from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from mstar_core.client import MStarClient
from tests.api.conftest import Api, running
from tests.fakes.any_model import SPEC, everything
from tests.fakes.conductor import Script

T = TypeVar("T")
SHARED = pytest.mark.asyncio(loop_scope="module")
"""For tests that take `api`: they run in the loop that it lives in."""


@asynccontextmanager
async def any_api(script: Script | None = everything, **changes: Any) -> AsyncIterator[Api]:
    """An api that serves the model of every modality. changes: as for `running`."""
    async with running(script, model=SPEC, **changes) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[Api]:
    """One api for the tests of a module."""
    async with any_api() as started:
        yield started


@pytest.fixture
def api(shared_api: Api) -> Api:
    """The module's api, with nothing noted of what came before. A test may set `api.fake.script`."""
    shared_api.fake.received.clear()
    shared_api.fake.script = everything
    return shared_api


async def in_thread(work: Callable[[MStarClient], T], url: str, **options: Any) -> T:
    """Run `work` with a client of its own on a thread, while the api runs in this loop."""

    def run() -> T:
        with MStarClient(url, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)
