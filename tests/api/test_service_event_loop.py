"""Large bodies and responses of every route do not block the event loop, whose delay is measured from inside."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from typing import Any

import httpx
import pytest

from mstar_core.messages.requests import NewRequest
from tests.api.own_process import OwnApi, own_api, spec_in
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import SPEC

LAG_S = 0.05
TRIES = 4
"""Blocking shows in every try; interference by other programs only in some."""

SOUND = 24_000 * 60
"""Samples of the response: a minute, 2.9 MB."""

PNG = base64.b64encode(media.image(700, 600, "BMP")).decode()
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/bmp;base64,{PNG}"}}


def answer(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: every requested output, large."""
    if "text" in request.outputs:
        fake.text(request.handle, b"a" * 200)
    if "audio" in request.outputs:
        fake.audio(request.handle, SOUND)
    if "image" in request.outputs:
        fake.image(request.handle, 1024, 1024)
    fake.finish(request.handle)


def say(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CALLS: dict[str, dict[str, Any]] = {
    "json": {"url": "/generate", "json": {"text": "x", "model_kwargs": {"grid": [0.5] * 50_000}}},
    "upload": {"url": "/generate", "data": {"text": "x"}, "files": {"files": ("a", media.image(2500, 2000, "BMP"))}},
    "chat with an image": {"url": "/v1/chat/completions", "json": {"messages": say([IMAGE])}},
    "long chat": {"url": "/v1/chat/completions", "json": {"messages": say("x" * 400_000), "stream": True}},
    "spoken wav": {"url": "/v1/audio/speech", "json": {"input": "x"}},
    "spoken mp3": {"url": "/v1/audio/speech", "json": {"input": "x", "response_format": "mp3", "stream": True}},
    "spoken events": {"url": "/v1/audio/speech", "json": {"input": "x", "stream_format": "sse"}},
    "spoken chat": {
        "url": "/v1/chat/completions",
        "json": {"messages": say("x"), "modalities": ["audio"], "audio": {"format": "wav"}},
    },
    "sound as json": {"url": "/generate", "data": {"text": "x", "output_modalities": "audio", "streaming": "0"}},
    "image": {"url": "/v1/images/generations", "json": {"prompt": "x"}},
    "many fields": {
        "url": "/generate",
        "content": b"&".join(b"a%d=b" % i for i in range(100_000)),
        "headers": {"Content-Type": "application/x-www-form-urlencoded"},
    },
    "deep": {"url": "/generate", "content": b"[" * 400_000, "headers": {"Content-Type": "application/json"}},
    "metrics": {"method": "GET", "url": "/metrics"},
    "description": {"method": "GET", "url": "/openapi.json"},
}


async def lag_of(api: OwnApi, call: dict[str, Any]) -> tuple[int, float]:
    """Return the status of a call and the longest delay of the loop during it."""

    def ask() -> tuple[int, float]:
        api.ask()
        got = httpx.request(
            **{"method": "POST", **call, "url": f"http://127.0.0.1:{api.port}{call['url']}"}, timeout=60
        )
        return got.status_code, max(api.ask()["lags_s"], default=0.0)

    return await asyncio.to_thread(ask)


@pytest.mark.timeout(240)
async def test_no_body_and_no_answer_blocks_the_loop() -> None:
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        spec = spec_in(folder, SPEC)
        fake = FakeDeployment(spec.ipc_dir, answer)
        fake.attach()
        lags = {}
        try:
            async with own_api(spec, fake.supervisor, "tests.fakes.omni_model") as api:
                await fake.until(lambda: bool(fake.received))
                fake.ready()
                await api.ready()
                for name, call in CALLS.items():
                    tries: list[float] = []
                    while len(tries) < TRIES and (not tries or min(tries) > LAG_S):
                        status, lag = await lag_of(api, call)
                        tries.append(lag)
                        assert status < 500, name
                    lags[name] = min(tries)
        finally:
            fake.close()
    print(json.dumps({name: round(1000 * lag, 1) for name, lag in lags.items()}))
    assert {name: lag for name, lag in lags.items() if lag > LAG_S} == {}
