"""The api's link to a worker of another host: outputs and loop states are fetched, and keep their order."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import AbstractAsyncContextManager

import httpx
import numpy as np

from mstar_core.config.deployment import HostPlan
from mstar_core.messages.requests import NewRequest
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport import RemoteAccess, make_keys
from tests.api.conftest import Api, running
from tests.fakes.conductor import FakeDeployment, Script

HOSTS = (HostPlan(name="", address="127.0.0.1"), HostPlan(name="far", address="127.0.0.1"))
FORM = {"text": "x", "output_modalities": "audio", "request_id": "r"}
LARGE = 1_000_000
"""Samples of an output that is fetched."""


def apart(script: Script | None = None) -> AbstractAsyncContextManager[Api]:
    """Run an api whose worker is on another host."""
    return running(script, hosts=HOSTS, far=RemoteAccess("127.0.0.1", make_keys()))


def part(answer: httpx.Response, modality: str) -> bytes:
    lines = [json.loads(line) for line in answer.content.split(b"\n") if line]
    return b"".join(base64.b64decode(line["data"]) for line in lines if line["modality"] == modality)


def pcm(answer: httpx.Response) -> bytes:
    return part(answer, "audio")


async def test_outputs_of_any_size_come_whole_and_in_order_and_their_loans_end() -> None:
    sizes = (LARGE, 3, 700_000, 5, 200_000)

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        for value, size in enumerate(sizes):
            fake.audio(request.handle, size, value=value + 1)
        fake.finish(request.handle)  # comes before the first output

    async with apart(answer) as api:
        heard = pcm(await api.client.post("/generate", data=FORM))
        assert heard == b"".join(bytes([value + 1, 0]) * size for value, size in enumerate(sizes))
        await api.fake.until(lambda: api.fake.live_loans == 0)
        await api.clean()


async def test_the_death_of_the_worker_during_a_fetch_sends_the_request_again() -> None:
    async with apart() as api:
        asking = asyncio.create_task(api.client.post("/generate", data=FORM))
        request = await api.fake.next_request()
        api.fake.audio(request.handle, 100, value=1)
        api.fake.silence()
        api.fake.audio(request.handle, LARGE, value=2)
        api.fake.finish(request.handle)
        link = api.process.link
        await api.until(lambda: link._tensors._fetches is not None and link._tensors._fetches.live == 1)
        api.fake.down("worker-0", "killed")
        again = await api.fake.next_request(2)
        assert again.resume is not None and again.resume.attempt == 2
        assert again.resume.delivered == {"pcm": 100}
        api.fake.fail(again.handle)
        assert part(await asking, "error") == b"node LLM failed"
        await api.clean()


async def test_an_output_whose_loan_has_ended_fails_its_request_alone() -> None:
    async with apart() as api:
        asking = asyncio.create_task(api.client.post("/generate", data=FORM))
        request = await api.fake.next_request()
        api.fake.audio(request.handle, LARGE)
        api.fake.end_loans()
        api.fake.finish(request.handle)
        answer = await asking
        assert answer.status_code == 500 and "the request failed in worker-0" in answer.text
        other = asyncio.create_task(api.client.post("/generate", data={**FORM, "request_id": "s"}))
        request = await api.fake.next_request(2)
        api.fake.audio(request.handle, LARGE)
        api.fake.finish(request.handle)
        assert len(pcm(await other)) == 2 * LARGE
        await api.clean()


async def test_a_cancelled_request_returns_what_is_fetched_for_it() -> None:
    async with apart() as api:
        asking = asyncio.create_task(api.client.post("/generate", data=FORM))
        request = await api.fake.next_request()
        api.fake.audio(request.handle, LARGE)
        api.fake.cancel(request.handle)
        await asking
        await api.fake.until(lambda: api.fake.live_loans == 0)
        await api.clean()


async def test_states_of_loops_are_kept_and_an_older_one_replaces_no_newer_one() -> None:
    state = np.arange(200_000, dtype=np.float32)
    async with apart() as api:
        asking = asyncio.create_task(api.client.post("/generate", data=FORM))
        request = await api.fake.next_request()
        api.fake.save(request.handle, "LLM:0/denoise", 5, latents=state, step=np.zeros(2, dtype=np.float32))
        api.fake.save(request.handle, "LLM:0/denoise", 10, step=np.ones(1, dtype=np.float32))  # needs no fetch
        api.fake.save(request.handle, "LLM:1/denoise", 5, latents=state)
        await api.fake.until(lambda: api.fake.live_loans == 0)
        api.fake.lose(request.handle)
        again = await api.fake.next_request(2)
        assert again.resume is not None
        saved = again.resume.saved
        latents = saved["LLM:1/denoise"].values["latents"]
        assert saved["LLM:0/denoise"].iteration == 10 and isinstance(latents, ShmTensor)
        fetch = api.fake.fetch(latents)
        await api.until(lambda: api.fake.fetched(fetch))
        assert np.array_equal(np.asarray(fetch.result()).view(np.float32).ravel(), state)
        api.fake.fail(again.handle)
        await asking
        await api.clean()


async def test_inputs_are_lent_for_the_workers_of_other_hosts() -> None:
    async with apart() as api:
        asking = asyncio.create_task(api.client.post("/generate", data={**FORM, "text": "large"}))
        request = await api.fake.next_request()
        lent = [ref for ref in request.inputs.values() if isinstance(ref, ShmTensor)]
        assert lent
        fetch = api.fake.fetch(lent[0])
        await api.until(lambda: api.fake.fetched(fetch))
        assert fetch.result().nbytes == lent[0].size_bytes
        api.fake.fail(request.handle)
        await asking
        await api.clean()
