"""Routes of the web pages: files, content security policy, keys, loopback, and the switch that removes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mstar_core.api.console.assets import POLICY
from mstar_core.api.console.supervisor_view import shown_frame
from mstar_core.api.http.access import host_name
from mstar_core.api.routes.console import _is_loopback
from tests.api.conftest import running
from tests.fakes.conductor import speak
from tests.fakes.robot_model import SPEC as ROBOT

STATIC = Path(__file__).parents[2] / "mstar_core" / "api" / "console" / "static"


async def test_the_page_and_its_files_are_served_with_a_strict_policy() -> None:
    async with running(speak(1)) as api:
        for path in ("/", "/docs", *(f"/assets/{file.name}" for file in STATIC.iterdir())):
            answer = await api.client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await api.client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await api.client.get("/assets/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e", "__init__.py", "app.js%00"])
async def test_other_files_are_out_of_reach(name: str) -> None:
    async with running(speak(1)) as api:
        answer = await api.client.get(f"/assets/{name}")
        assert answer.status_code == 404, answer.text


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda file: file.name)
def test_no_file_names_another_origin_or_runs_inline(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"https?://[^\s\"'`$]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=\"", text)
    assert "localStorage" not in text and "sessionStorage" not in text and "document.cookie" not in text


async def test_without_the_console_there_is_no_page() -> None:
    async with running(speak(1), console=False) as api:
        for path in ("/", "/console/live", "/console/trace/x"):
            assert (await api.client.get(path)).status_code == 404, path
        assert (await api.client.get("/docs")).status_code == 200


async def test_a_robots_socket_and_the_page_share_the_root() -> None:
    async with running(speak(1), model=ROBOT, api_keys=("k",)) as api:
        page = await api.client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
        assert (await api.client.get("/", headers=upgrade)).status_code == 401
    async with running(speak(1), model=ROBOT, console=False) as api:
        assert (await api.client.get("/")).status_code == 426


async def test_pages_need_no_key_and_their_data_does() -> None:
    async with running(speak(1), api_keys=("k",)) as api:
        for path in ("/", "/docs", "/assets/app.js"):
            assert (await api.client.get(path)).status_code == 200, path
        for path in ("/v1/models", "/openapi.json", "/console/live", "/console/trace/x"):
            assert (await api.client.get(path)).status_code == 401, path
            assert (await api.client.get(path, headers={"Authorization": "Bearer no"})).status_code == 401, path
        # A key may read from anywhere; the fakes have no supervisor.
        for headers in ({"X-Forwarded-For": "10.0.0.1"}, {"Host": "example.org"}, {}):
            answer = await api.client.get("/console/live", headers={"Authorization": "Bearer k", **headers})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    "headers, code",
    [({"X-Forwarded-For": "10.0.0.1"}, "loopback_only"), ({"Forwarded": "for=1"}, "loopback_only"),
     ({"Host": "evil.example"}, "host_not_allowed")],
)  # fmt: skip
async def test_without_a_key_the_live_view_stays_on_the_host(headers: dict[str, str], code: str) -> None:
    async with running(speak(1)) as api:
        for path in ("/console/live", "/console/trace/x"):
            answer = await api.client.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
        assert (await api.client.get("/console/trace/x")).json()["error"]["code"] == "request_not_found"


async def test_traces_of_other_keys_are_unknown() -> None:
    async with running(speak(1), api_keys=("a", "b")) as api:
        headers = {"Authorization": "Bearer a", "X-Request-ID": "mine"}
        assert (await api.client.post("/v1/audio/speech", json={"input": "hi"}, headers=headers)).status_code == 200
        other = await api.client.get("/console/trace/mine", headers={"Authorization": "Bearer b"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "request_not_found")
        assert (await api.client.get("/console/trace/mine", headers=headers)).status_code == 503


def test_the_live_view_contains_no_requests_paths_or_process_ids() -> None:
    head = {"name": "n", "log_dir": "/secret", "pid": 3, "endpoint": "x", "running": 2, "cause": {"file": "y"}}
    frame = {"k": "snapshot", "rev": 1, "deployment": head, "requests": {"1": {}}, "events": [], "nodes": {"a@0": {}}}
    shown = shown_frame(frame)
    assert shown == {"k": "snapshot", "rev": 1, "deployment": {"name": "n", "running": 2}, "nodes": {"a@0": {}}}
    assert shown_frame({"k": "hello"}) is None
    assert shown_frame({"k": "event", "request": "r"}) is None


@pytest.mark.parametrize(
    "peer, is_local",
    [(("127.0.0.1", 5), True), (("::1", 5, 0, 0), True), (("::ffff:127.0.0.1", 5, 0, 0), True),
     (("10.0.0.1", 5), False), (("fe80::1%eth0", 5, 0, 2), False), (None, False), ("", False)],
)  # fmt: skip
def test_loopback_addresses(peer: object, is_local: bool) -> None:
    assert _is_loopback(peer) is is_local


def test_host_names() -> None:
    assert [host_name(host) for host in ("localhost:8000", "[::1]:80", "127.0.0.1", "LOCALHOST")] == [
        "localhost", "::1", "127.0.0.1", "localhost",
    ]  # fmt: skip
