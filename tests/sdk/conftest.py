"""What every test of the clients uses: an api with a model of every modality, and a thread to speak to it from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mstar_core.client import MStarClient
from tests.api.conftest import Api, running
from tests.fakes.any_model import SPEC, everything
from tests.fakes.conductor import Script

T = TypeVar("T")


@asynccontextmanager
async def any_api(script: Script | None = everything, **changes: Any) -> AsyncIterator[Api]:
    """An api that serves the model of every modality. changes: as for `running`."""
    async with running(script, model=SPEC, **changes) as api:
        yield api


async def in_thread(work: Callable[[MStarClient], T], url: str, **options: Any) -> T:
    """Run `work` with a client of its own on a thread, while the api runs in this loop."""

    def run() -> T:
        with MStarClient(url, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)
