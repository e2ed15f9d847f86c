"""A gateway in its own processes: start, restart without a refused connection, death, changes, end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mstarctl.client import AdminClient
from tests.fakes.deployments import FakeDeployment
from tests.fakes.ports import free_port

MSTARCTL = Path(sys.executable).with_name("mstarctl")


@dataclass(frozen=True)
class Served:
    """A running gateway. fake_port: where its model `llm` is expected."""

    file: Path
    url: str
    fake_port: int
    environment: dict[str, str]

    def mstarctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command against it."""
        return subprocess.run(
            [str(MSTARCTL), *words], env=self.environment, capture_output=True, text=True, timeout=250, check=False
        )

    async def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command while the test's loop goes on."""
        return await asyncio.to_thread(self.mstarctl, *words)

    def worker(self) -> int:
        """Return the pid of the gateway's worker."""
        with AdminClient(self.socket) as admin:
            return int(admin.head()["worker"])

    @property
    def socket(self) -> Path:
        """The admin socket."""
        return Path(self.environment["MSTAR_RUNTIME_DIR"], ".gateways", "gateway", "admin.sock")

    def head(self) -> dict[str, Any]:
        """Return the gateway's line of `ps`."""
        items = json.loads(self.mstarctl("ps", "gateway", "-o", "json").stdout)["items"]
        return dict(items[0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    folder.chmod(0o700)
    fake_port, port = free_port(), free_port()
    file = folder / "serve.yaml"
    file.write_text(f"port: {port}\nmodels:\n  llm: {{url: 'http://127.0.0.1:{fake_port}', aliases: [mini]}}\n")
    environment = {**os.environ, "MSTAR_RUNTIME_DIR": str(folder / "run")}
    environment.pop("XDG_STATE_HOME", None)
    gateway = Served(file, f"http://127.0.0.1:{port}", fake_port, environment)
    started = gateway.mstarctl("serve", str(file), "-d")
    assert started.returncode == 0, started.stderr
    try:
        yield gateway
        ended = gateway.mstarctl("serve", "down")
        assert ended.returncode == 0, ended.stderr
        assert not list((folder / "run" / ".gateways").iterdir())
    finally:
        gateway.mstarctl("serve", "down", "--now")


@pytest.fixture
async def fake(served: Served) -> AsyncIterator[FakeDeployment]:
    deployment = FakeDeployment("llm")
    await deployment.start(served.fake_port)
    yield deployment
    await deployment.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as opened:
        yield opened


async def ask(session: aiohttp.ClientSession, served: Served) -> str:
    """Send one request on a connection of its own, and return who answered."""
    async with session.post(f"{served.url}/v1/completions", json={"model": "mini", "prompt": "a"}) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["by"])


def kill(pid: int) -> None:
    """End a process that another one started, and wait until it has ended: it would still accept a connection."""
    watch = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        assert select.select([watch], [], [], 60)[0]
    finally:
        os.close(watch)


async def test_it_is_listed_and_its_socket_is_private(served: Served) -> None:
    head = await asyncio.to_thread(served.head)
    assert (head["name"], head["state"], head["endpoint"]) == ("gateway", "ready", served.url)
    assert head["socket"] == str(served.socket)
    assert stat.S_IMODE(os.stat(served.socket).st_mode) == 0o600


async def test_a_restart_refuses_no_connection_and_finishes_what_runs(
    served: Served, fake: FakeDeployment, session: aiohttp.ClientSession
) -> None:
    gate, is_over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/generate":
            return await fake.echo(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begin ")
        await gate.wait()
        await response.write(b"end")
        await response.write_eof()
        return response

    async def keep_asking() -> int:
        count = 0
        while not is_over.is_set():
            assert await ask(session, served) == "llm"
            count += 1
        return count

    fake.handler = answer
    async with session.post(f"{served.url}/generate", json={}) as running:
        assert await running.content.readany() == b"begin "
        asking = asyncio.ensure_future(keep_asking())
        restarted = await served.command("serve", "restart")
        is_over.set()
        assert restarted.returncode == 0, restarted.stderr
        assert await asking > 0
        gate.set()
        assert await running.content.read() == b"end"


async def test_a_killed_worker_is_started_again_and_connections_wait(
    served: Served, fake: FakeDeployment, session: aiohttp.ClientSession
) -> None:
    before = await asyncio.to_thread(served.worker)
    await asyncio.to_thread(kill, before)
    assert await ask(session, served) == "llm"
    after = await asyncio.to_thread(served.worker)
    assert after != before


async def test_models_are_added_and_removed_and_survive_a_restart(
    served: Served, fake: FakeDeployment, session: aiohttp.ClientSession
) -> None:
    added = await served.command("serve", "add", "more", "--url", f"http://127.0.0.1:{served.fake_port}")
    assert added.returncode == 0, added.stderr
    assert (await served.command("serve", "restart")).returncode == 0
    listed = json.loads((await served.command("serve", "ls", "-o", "json")).stdout)["items"]
    assert [item["name"] for item in listed] == ["llm", "more"]
    clash = await served.command("serve", "add", "mini", "--url", "http://127.0.0.1:1")
    assert clash.returncode == 2 and "'mini' names 'llm' already" in clash.stderr
    assert (await served.command("serve", "remove", "more")).returncode == 0
    missing = await served.command("serve", "remove", "llmm")
    assert missing.returncode == 4 and "did you mean 'llm'?" in missing.stderr


async def test_a_file_with_faults_changes_nothing(served: Served, fake: FakeDeployment) -> None:
    text = served.file.read_text()
    try:
        served.file.write_text(text.replace("aliases", "aliasses"))
        refused = await served.command("serve", "reload")
        assert refused.returncode != 0 and "aliasses" in refused.stderr
        served.file.write_text(text + "  other: {url: 'http://127.0.0.1:9'}\n")
        assert (await served.command("serve", "reload")).returncode == 0
        listed = json.loads((await served.command("serve", "ls", "-o", "json")).stdout)["items"]
        assert [item["name"] for item in listed] == ["llm", "other"]
    finally:
        served.file.write_text(text)
        await served.command("serve", "reload")


async def test_a_second_gateway_runs_beside_it(served: Served) -> None:
    same = await served.command("serve", "-d", "--port", str(free_port()))
    assert same.returncode == 6 and "already running" in same.stderr
    port = free_port()
    assert (await served.command("serve", "-d", "--name", "second", "--port", str(port))).returncode == 0
    assert "2 gateways are running" in (await served.command("serve", "ls")).stderr
    assert (await served.command("serve", "down", "second")).returncode == 0
