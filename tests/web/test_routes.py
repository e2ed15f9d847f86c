"""Routes of the web pages: files, content security policy, keys, loopback, and the switch that removes them."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mstar_core.api.console.assets import POLICY
from mstar_core.api.console.neighbours import neighbours
from mstar_core.api.console.supervisor_view import shown_frame
from mstar_core.api.http.access import host_name
from mstar_core.api.routes.console import _is_loopback
from mstar_core.host.run_dir import RunDirectory
from tests.api.conftest import running
from tests.fakes.conductor import speak
from tests.fakes.robot_model import SPEC as ROBOT

STATIC = Path(__file__).parents[2] / "mstar_core" / "api" / "console" / "static"
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())
STORING = "core/shelf.js"
"""The one module that may use the browser's storage. API keys are not its business."""


def name_of(file: Path) -> str:
    """Return the name of a static file, such as `core/dom.js`."""
    return file.relative_to(STATIC).as_posix()


async def test_the_page_and_its_files_are_served_with_a_strict_policy() -> None:
    async with running(speak(1)) as api:
        for path in ("/", "/docs", *(f"/assets/{name_of(file)}" for file in FILES)):
            answer = await api.client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await api.client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await api.client.get("/assets/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "core", "core/", "core/..%2fapp.js", "..%2f__init__.py", "%2e%2e", "__init__.py", "app.js%00"],
)
async def test_other_files_are_out_of_reach(name: str) -> None:
    async with running(speak(1)) as api:
        answer = await api.client.get(f"/assets/{name}")
        assert answer.status_code == 404, answer.text


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_file_names_another_origin_or_runs_inline(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"https?://[^\s\"'`$]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=\"", text)
    assert "sessionStorage" not in text and "document.cookie" not in text
    assert "outerHTML" not in text and "document.write" not in text
    if name_of(file) != STORING:
        assert "localStorage" not in text and "indexedDB" not in text


def test_every_file_is_packaged_and_every_import_is_a_file() -> None:
    settings = tomllib.loads((STATIC.parents[3] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["mstar_core"]
    package = STATIC.parents[2]
    packaged = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    assert set(FILES) <= packaged
    for file in FILES:
        for target in re.findall(r"from \"(\.[^\"]+)\"", file.read_text()):
            assert (file.parent / target).resolve() in FILES, (name_of(file), target)


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


@pytest.fixture
def neighbour() -> Iterator[Path]:
    """The run directory of a running deployment. Beside it, `other` runs and `gone` has ended."""
    with tempfile.TemporaryDirectory(prefix="mstar-web-") as folder, ExitStack() as stack:
        for name, is_running in (("own", True), ("other", True), ("gone", False)):
            run = RunDirectory(Path(folder) / name)
            run.create()
            api = {"host": "127.0.0.1", "port": 8123, "console": True, "api_keys": ["secret"], "tls_cert": None}
            run.spec.write_text(json.dumps({"name": name, "model": "bagel", "log_dir": "/secret", "api": api}))
            if is_running:
                stack.callback(os.close, run.acquire())
        yield Path(folder) / "own"


def test_other_deployments_are_named_with_their_address_alone(neighbour: Path) -> None:
    assert neighbours(str(neighbour)) == [
        {"name": "other", "model": "bagel", "host": "127.0.0.1", "port": 8123, "is_tls": False}
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "m", "api": {"console": true}}', '{"api": 3}'])
def test_a_damaged_file_of_another_deployment_is_left_out(text: str, neighbour: Path) -> None:
    (neighbour.parent / "other" / "spec.json").write_text(text)
    assert neighbours(str(neighbour)) == []


def test_a_deployment_without_a_page_is_left_out(neighbour: Path) -> None:
    file = neighbour.parent / "other" / "spec.json"
    file.write_text(file.read_text().replace('"console": true', '"console": false'))
    assert neighbours(str(neighbour)) == []


async def test_a_key_of_one_deployment_reveals_no_other_from_elsewhere() -> None:
    async with running(speak(1), api_keys=("k",)) as api:
        key = {"Authorization": "Bearer k"}
        assert (await api.client.get("/console/deployments")).status_code == 401
        answer = await api.client.get("/console/deployments", headers=key)
        assert (answer.status_code, list(answer.json())) == (200, ["deployments"])
        for headers in ({"X-Forwarded-For": "10.0.0.1"}, {"Host": "example.org"}):
            answer = await api.client.get("/console/deployments", headers=key | headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "loopback_only")


@pytest.mark.parametrize(
    "headers, code",
    [
        ({"X-Forwarded-For": "10.0.0.1"}, "loopback_only"),
        ({"Forwarded": "for=1"}, "loopback_only"),
        ({"Host": "evil.example"}, "host_not_allowed"),
    ],
)
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
    [
        (("127.0.0.1", 5), True),
        (("::1", 5, 0, 0), True),
        (("::ffff:127.0.0.1", 5, 0, 0), True),
        (("10.0.0.1", 5), False),
        (("fe80::1%eth0", 5, 0, 2), False),
        (None, False),
        ("", False),
    ],
)
def test_loopback_addresses(peer: object, is_local: bool) -> None:
    assert _is_loopback(peer) is is_local


def test_host_names() -> None:
    assert [host_name(host) for host in ("localhost:8000", "[::1]:80", "127.0.0.1", "LOCALHOST")] == [
        "localhost",
        "::1",
        "127.0.0.1",
        "localhost",
    ]


def test_the_page_does_not_learn_of_other_processes_on_a_gpu() -> None:
    gpus = {"0": {"index": 0, "util": 0.5, "processes": {"4242": ["python3", 1024]}}}
    for frame in ({"k": "snapshot", "gpus": gpus}, {"k": "delta", "set": {"gpus": gpus}}):
        assert "4242" not in str(shown_frame(frame)) and "util" in str(shown_frame(frame))
