"""Keys and certificates that change while the api serves, and keys that open the metrics alone."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import msgspec

from mstar_core.config.live import with_live
from mstar_core.config.resolved import ApiConfig
from mstar_core.messages.life import Reload
from tests.api.conftest import LIMIT_S, Api, Started
from tests.api.test_access import GOOD
from tests.fakes.certificates import certificate_in
from tests.fakes.conductor import begin, speak


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def reload(api: Api, **changes: object) -> None:
    """Let the api take a changed spec, as the supervisor writes it."""
    spec = api.process.spec
    changed: ApiConfig = msgspec.structs.replace(spec.api, **changes)
    (Path(spec.run_dir) / "spec.json").write_bytes(msgspec.structs.replace(spec, api=changed).encode())
    api.fake.tell(Reload())
    await api.until(lambda: api.process.spec is not spec)


async def test_limits_that_were_set_live_hold_for_requests_in_flight_too(started: Started) -> None:
    async with started(begin) as api:
        link = api.process.link
        spec = with_live(api.process.spec, {"max_concurrent_requests": 1, "max_queue": 0, "api.timeout_s": 9}, "noon")
        async with api.client.stream("POST", "/generate", data=GOOD) as answer:
            request = await api.fake.next_request()
            (Path(spec.run_dir) / "spec.json").write_bytes(spec.encode())
            api.fake.tell(Reload())
            await api.until(lambda: link.gauges()["slots"] == 1)
            assert (await api.client.post("/generate", data=GOOD)).status_code == 429
            assert api.process.spec.api.timeout_s == 9
            api.fake.finish(request.handle)
            assert answer.status_code == 200 and (await answer.aread()).count(b"\n") == 1


async def test_a_metrics_key_opens_the_metrics_alone(started: Started) -> None:
    async with started(speak(1), api_keys=("k",), metrics_keys=("m",)) as api:
        for key, path, status in (
            ("m", "/metrics", 200),
            ("k", "/metrics", 200),
            ("x", "/metrics", 401),
            ("m", "/v1/models", 401),
            ("m", "/console/live", 401),
            ("m", "/version", 401),
            ("k", "/version", 200),
        ):
            assert (await api.client.get(path, headers=bearer(key))).status_code == status, (key, path)
        assert (await api.client.post("/generate", data=GOOD, headers=bearer("m"))).status_code == 401
    async with started(speak(1), metrics_keys=("m",)) as api:
        assert (await api.client.get("/metrics")).status_code == 401
        assert (await api.client.get("/version")).status_code == 200


async def test_new_keys_are_accepted_and_old_ones_refused_while_requests_go_on(started: Started) -> None:
    async with started(begin, api_keys=("old", "kept")) as api:
        async with api.client.stream("POST", "/generate", data=GOOD, headers=bearer("old")) as answer:
            request = await api.fake.next_request()
            await reload(api, api_keys=("kept", "new"), metrics_keys=("m",))
            for key, status in (("old", 401), ("kept", 200), ("new", 200)):
                assert (await api.client.get("/v1/models", headers=bearer(key))).status_code == status
            assert (await api.client.get("/metrics", headers=bearer("m"))).status_code == 200
            api.fake.finish(request.handle)
            assert answer.status_code == 200 and (await answer.aread()).count(b"\n") == 1


async def test_new_connections_get_the_new_certificate(started: Started, tmp_path: Path) -> None:
    first, second = (certificate_in(tmp_path / name) for name in ("a", "b"))
    async with started(speak(1), tls_cert=str(first[0]), tls_key=str(first[1])) as api:
        url = api.url.replace("http:", "https:")
        trusted = ssl.create_default_context(cafile=first[0])
        async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=LIMIT_S) as kept:
            assert (await kept.get("/health")).status_code == 200
            for source, target in zip(second, first, strict=True):
                target.write_bytes(source.read_bytes())
            await reload(api)
            assert (await kept.get("/health")).status_code == 200, "its connection stays"
        trusted = ssl.create_default_context(cafile=second[0])
        async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=LIMIT_S) as client:
            assert (await client.get("/health")).status_code == 200
