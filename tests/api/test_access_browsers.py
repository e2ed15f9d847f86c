"""Requests that web pages of other origins make a browser send, with and without API keys."""

from __future__ import annotations

import pytest

from mstar_core.api.errors import Forbidden
from mstar_core.api.http.access import check_browser
from mstar_core.config.resolved import ApiConfig
from tests.api.conftest import Started
from tests.fakes.conductor import speak

LOCAL = ApiConfig(host="127.0.0.1")
OPEN = ApiConfig(host="0.0.0.0")
PAGE = "https://app.example"
ALLOWED = ApiConfig(host="localhost", cors_origins=(PAGE,))
KEYS = ApiConfig(host="127.0.0.1", api_keys=("k",))
GOOD = {"text": "x", "output_modalities": "audio"}


@pytest.mark.parametrize(
    "api, method, headers",
    [
        (LOCAL, "POST", {"host": "127.0.0.1:8000"}),
        (LOCAL, "POST", {"host": "LOCALHOST:8000", "sec-fetch-site": "same-origin", "origin": "http://localhost:8000"}),
        (LOCAL, "POST", {"host": "localhost", "sec-fetch-site": "none"}),
        (LOCAL, "POST", {"host": "[::1]:8000", "origin": "http://[::1]:8000"}),
        (LOCAL, "POST", {}),
        (LOCAL, "GET", {"host": "box.localhost"}),
        (LOCAL, "GET", {"host": "10.0.0.7:8000"}),
        (LOCAL, "GET", {"host": "localhost", "sec-fetch-site": "cross-site", "origin": PAGE}),
        (OPEN, "POST", {"host": "gpu7:8000"}),
        (ALLOWED, "POST", {"host": "localhost", "sec-fetch-site": "cross-site", "origin": PAGE}),
        (ALLOWED, "POST", {"host": "app.example", "sec-fetch-site": "same-origin", "origin": PAGE}),
        (KEYS, "POST", {"host": "evil.example", "sec-fetch-site": "cross-site", "origin": PAGE}),
    ],
)
def test_allowed(api: ApiConfig, method: str, headers: dict[str, str]) -> None:
    check_browser(api, method, headers)


@pytest.mark.parametrize(
    "api, method, headers, code",
    [
        (LOCAL, "GET", {"host": "evil.example"}, "host_not_allowed"),
        (LOCAL, "POST", {"host": "localhost.evil.example:8000"}, "host_not_allowed"),
        (ALLOWED, "GET", {"host": "evil.example"}, "host_not_allowed"),
        (LOCAL, "POST", {"host": "localhost", "sec-fetch-site": "cross-site"}, "origin_not_allowed"),
        (LOCAL, "POST", {"host": "localhost:8000", "sec-fetch-site": "same-site"}, "origin_not_allowed"),
        (LOCAL, "POST", {"host": "localhost:8000", "origin": "http://localhost:3000"}, "origin_not_allowed"),
        (LOCAL, "POST", {"host": "localhost", "origin": "null"}, "origin_not_allowed"),
        (OPEN, "POST", {"host": "gpu7:8000", "origin": PAGE}, "origin_not_allowed"),
        (ALLOWED, "POST", {"host": "localhost", "origin": "https://evil.example"}, "origin_not_allowed"),
    ],
)
def test_refused(api: ApiConfig, method: str, headers: dict[str, str], code: str) -> None:
    with pytest.raises(Forbidden) as refused:
        check_browser(api, method, headers)
    assert refused.value.code == code and ("API key" in refused.value.hint or "--cors-origin" in refused.value.hint)


async def test_every_route_checks_the_browser(started: Started) -> None:
    async with started(speak(1)) as api:
        foreign = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        for path in ("/generate", "/v1/requests/x/cancel", "/v1/audio/speech"):
            answer = await api.client.post(path, data=GOOD, headers=foreign)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), path
        for path in ("/v1/models", "/health", "/", "/metrics", "/openapi.json"):
            answer = await api.client.get(path, headers={"Host": "evil.example"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
        assert (await api.client.post("/generate", data=GOOD)).status_code == 200
