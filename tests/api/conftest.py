"""A real api process object on its own port, in the test's loop, between fake peers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from mstar_core.api.main import ApiProcess
from mstar_core.api.parse.media import Fetcher
from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.config.resolved import ApiConfig
from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews
from mstar_core.plugin.spec import ModelSpec
from mstar_core.transport import KEYS_FILE, RemoteAccess, write_keys
from tests.fakes.conductor import FakeDeployment, Script
from tests.fakes.kept_pool import KeptProcess
from tests.fakes.speech_model import SPEC
from tests.fakes.tls import NO_AUTHORITIES

LIMIT_S = 60.0
"""Time-out for events that are immediate on an idle machine; generous, because a busy machine may stall for seconds."""

LIMITS = (0.05, 0.5, 5.0, 30.0)
"""Deadlines to try in turn, for tests whose request must reach some state before its deadline."""


@dataclasses.dataclass
class Api:
    """The api under test. client: HTTP client. fake: all other processes."""

    process: ApiProcess
    fake: FakeDeployment
    client: httpx.AsyncClient
    url: str

    async def ready(self) -> None:
        """Let the deployment become ready, and wait until the api has received the message."""
        self.fake.ready()
        await self.until(lambda: self.process.link.deployment.problem() is None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition inside the api that no message reports."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 the state of the tested part has no event for tests
                await asyncio.sleep(0.002)

    async def clean(self) -> None:
        """Wait until no request holds anything; the last byte of a response may be read before that."""
        await self.until(lambda: self.service_is_clean)

    async def loops(self, count: int) -> list[tuple[float | None, int | None]]:
        """Wait until `count` requests were reported as ended. Returns the control loop of each, in order."""

        def ended() -> list[RequestNews]:
            sent = (news for telemetry in self.fake.of(Telemetry) for news in telemetry.requests)
            return [news for news in sent if news.ended is not None]

        await self.until(lambda: len(ended()) >= count)
        return [(news.period_ms, news.skipped_ticks) for news in ended()]

    @property
    def service_is_clean(self) -> bool:
        """Return whether no request, place, slot, output queue or lent tensor is left."""
        return not len(self.process.registry) and not self.process.link.output_queues and not self.process.link.loans


Started = Callable[..., AbstractAsyncContextManager[Api]]


@asynccontextmanager
async def running(
    script: Script | None = None,
    *,
    ready: bool = True,
    model: ModelSpec = SPEC,
    keepalive_s: float = 15.0,
    fetcher: Fetcher | None = None,
    far: RemoteAccess | None = None,
    **changes: Any,
) -> AsyncIterator[Api]:
    """Run an api between fake peers. far: access to the worker, if it is on another host than the others.

    changes: fields of ApiConfig or DeploymentSpec.
    """
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        api_fields = {field.name for field in msgspec.structs.fields(ApiConfig)}
        config = ApiConfig(**{"host": "127.0.0.1", "port": 0, **{k: v for k, v in changes.items() if k in api_fields}})
        spec = DeploymentSpec(
            name="fake",
            model=model.name,
            plugin="fake",
            run_dir=folder,
            log_dir=folder,
            plan=Plan(ranks=(), placements=()),
            api=config,
            **{"weights_source": "official"} | {k: v for k, v in changes.items() if k not in api_fields},
        )
        spec.ipc_dir.mkdir(mode=0o700)
        spec.uploads.mkdir(mode=0o700)
        if far is not None:
            write_keys(Path(folder) / KEYS_FILE, far.keys)
        fake = FakeDeployment(spec.ipc_dir, script, far)
        fake.attach()
        process = ApiProcess(
            spec, 0, fake.supervisor, model, keepalive_s=keepalive_s, fetcher=fetcher, make_process=KeptProcess
        )
        try:
            await process.start()
            url = f"http://127.0.0.1:{process.port}"
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, verify=NO_AUTHORITIES) as client:
                api = Api(process, fake, client, url)
                await fake.until(lambda: bool(fake.received))
                if ready:
                    await api.ready()
                yield api
        finally:
            await process.close()
            fake.close()
        assert not os.listdir(f"{folder}/uploads")


@pytest.fixture
def started() -> Started:
    """Start an api with the given settings."""
    return running
