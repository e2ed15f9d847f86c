"""Streams of the admin socket: watch, logs, events, blocked readers, and the limit of watchers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

from mstar_core.observe.frames import Frame
from mstarctl.client.store import Store, decode
from tests.admin.conftest import Admin, Serving

LIMIT_S = 60.0


async def frames(admin: Admin, query: str = "hz=10") -> AsyncIterator[Frame]:
    async with admin.client.stream("GET", f"/v1/watch?{query}") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("application/x-ndjson")
        rest = b""
        async for piece in response.aiter_bytes():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                frame = decode(line)
                assert frame is not None
                yield frame


def read_to_the_end(reader: socket.socket) -> None:
    """Read the rest; return when the other end has closed the connection."""
    while reader.recv(1 << 16):
        pass


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state of the server that no message reports."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  a state of the part under test has no event for tests
            await asyncio.sleep(0.01)


async def test_a_watch_follows_the_deployment(admin: Admin) -> None:
    store = Store()
    admin.deployment.request(7)
    async with asyncio.timeout(LIMIT_S):
        async for frame in frames(admin):
            store.apply(frame)
            assert not store.has_gap
            if store.is_synced and "8" not in store.requests:
                admin.deployment.request(8)
                admin.deployment.events.add("kv.preempt", request="r-7", pages=96)
            elif "8" in store.requests and store.events:
                break
    assert store.requests.keys() == {"7", "8"}
    assert store.events[-1].facts == {"request": "r-7", "pages": 96}
    assert store.boot == "boot-1"


async def test_a_watcher_that_disconnects_is_removed(admin: Admin) -> None:
    async for _ in frames(admin):
        break
    await until(lambda: not admin.deployment.hub.watchers)


async def test_a_seventeenth_watcher_is_refused_with_the_reason(admin: Admin) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(16):
            response = await stack.enter_async_context(admin.client.stream("GET", "/v1/watch?hz=10"))
            assert response.status_code == 200
        refused = await admin.get("/v1/watch", 503)
        assert refused["code"] == "too_many_watchers"
        await admin.get("/v1/health")


async def test_a_blocked_reader_costs_little_and_is_disconnected(started: Serving) -> None:
    async with started(blocked_s=0.5) as admin:
        reader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(str(admin.path))
        reader.sendall(b"GET /v1/watch?hz=10 HTTP/1.1\r\nHost: admin\r\n\r\n")
        hub, deployment = admin.deployment.hub, admin.deployment
        await until(lambda: hub.watchers == 1)
        async with asyncio.timeout(LIMIT_S):
            beat = 0
            while hub.watchers:
                beat += 1
                for handle in range(400):
                    deployment.request(handle, id=f"a-rather-long-request-id-{beat}-{handle}" + "x" * 200)
                assert all(len(each.dirty) <= 450 for each in hub._subscriptions)
                await admin.get("/v1/clock")  # other requests are not delayed
                await asyncio.sleep(0.05)
        reader.settimeout(LIMIT_S)
        await asyncio.to_thread(read_to_the_end, reader)
        reader.close()


async def test_logs_follow_new_lines_with_heartbeats_in_between(admin: Admin) -> None:
    log = admin.deployment.children["worker-0"].log
    log.say('{"message": "old"}')
    lines: list[object] = []
    beats = 0
    async with asyncio.timeout(LIMIT_S):
        async with admin.client.stream("GET", "/v1/logs?follow=1&from=worker/0&tail=5") as response:
            async for text in response.aiter_lines():
                seen = json.loads(text)
                beats += seen == {"beat": True}  # on a slow machine, a heartbeat may precede the second line
                if seen != {"beat": True}:
                    lines.append(seen)
                    log.say('{"message": "new"}') if len(lines) == 1 else None
                if len(lines) == 2 and beats:
                    break
    assert lines == [{"from": "worker-0", "line": f'{{"message": "{word}"}}'} for word in ("old", "new")]
    await until(lambda: not log.listeners)


async def test_old_lines_are_left_out(admin: Admin) -> None:
    log = admin.deployment.children["api"].log
    log.say('{"time": "2020-01-01T00:00:00+00:00", "message": "old"}')
    log.say("no json at all")
    text = (await admin.client.get("/v1/logs?since=60&from=api")).text
    assert [json.loads(line)["line"] for line in text.splitlines()] == ["no json at all"]


async def test_events_are_selected_by_type_and_number(admin: Admin) -> None:
    for kind in ("child.died", "deployment.ready", "child.spawned"):
        admin.deployment.events.add(kind)
    text = (await admin.client.get("/v1/events?since=1&type=child.*")).text
    assert [json.loads(line)["type"] for line in text.splitlines()] == ["child.spawned"]
