"""A deployment that replaces another one under load: no connection is refused, and each request ends whole."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.runtime.deployment import END_S, Deployment, until
from tests.runtime.steady_load import SteadyLoad

NEW = ("--device", "cpu", "--set", "kv_cache.pages=1024", "--set", "max_seq_len=2048")


def served_while_starting(deployment: Deployment, load: SteadyLoad) -> int:
    """Count the requests that came and ended between the first process of the new deployment and its readiness."""
    events = [json.loads(line) for line in deployment.shown("events", deployment.name, "-o", "json").splitlines()]
    spawned = next(event["time"] for event in events if event["type"] == "child.spawned")
    ready = next(event["time"] for event in events if event["type"] == "deployment.ready")
    to_epoch = time.time() - time.monotonic()
    return sum(spawned < heard.sent_s + to_epoch and heard.ended_s + to_epoch < ready for heard in load.heard)


@pytest.mark.parametrize("flags", [(), ("--stop-first",)])
async def test_a_deployment_is_replaced_under_load_without_a_failed_request(flags: tuple[str, ...]) -> None:
    with Deployment() as old:
        before = old.admin("/v1/")
        async with SteadyLoad(old.url) as load:
            words = ("up", "orpheus:tiny", "-d", "--replace", old.name, *NEW, *flags)
            await asyncio.to_thread(old.shown, *words)
            await load.some_more(20)
        assert load.outcomes.keys() == {"whole"}
        assert len({heard.pcm for heard in load.heard}) == 1
        assert old.wait_ended() == 0

        if not flags:
            assert served_while_starting(old, load), "the old deployment serves until the new one is ready"
        after = old.admin("/v1/")
        assert after["pid"] != before["pid"] and after["started_at"] > before["started_at"]
        assert [item["name"] for item in json.loads(old.shown("ps", "-o", "json"))["items"]] == [old.name]
        folders = [path.name for path in old.root.iterdir() if path.name != ".state"]
        assert sorted(folders) == sorted([old.name, old.run.real.path.name])
        children = {item["pid"] for item in old.admin("/v1/children") if item["pid"]} | {after["pid"]}
        strangers = [each for each in old.processes() if each.pid not in children and each.parent not in children]
        assert strangers == []
        old.shown("down", old.name)
        until(lambda: not old.processes(), "the end of every process", END_S)
        assert [path.name for path in old.root.iterdir()] == [".state"]
