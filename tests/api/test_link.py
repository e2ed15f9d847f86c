"""The api's link: what it reports about its requests."""

from __future__ import annotations

import asyncio

from mstar_core.messages.requests import Reconcile
from tests.api.conftest import Started


async def test_the_conductor_gets_the_live_requests_regularly(started: Started) -> None:
    form = {"text": "x", "streaming": "false"}
    async with started(None, reconcile_s=0.02) as api:
        await api.fake.until(lambda: bool(api.fake.of(Reconcile)))
        assert api.fake.of(Reconcile)[-1].live == []
        asking = asyncio.create_task(api.client.post("/generate", data=form))
        request = await api.fake.next_request()
        live = Reconcile(live=[request.handle], newest=request.handle)
        await api.fake.until(lambda: live in api.fake.of(Reconcile))
        api.fake.audio(request.handle)
        api.fake.finish(request.handle)
        assert (await asking).status_code == 200
        over = Reconcile(live=[], newest=request.handle)
        await api.fake.until(lambda: over in api.fake.of(Reconcile))
