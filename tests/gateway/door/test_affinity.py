"""Requests return to the replica that holds what they build on."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mstar_core.gateway.door import affinity
from mstar_core.gateway.door.affinity import Affinity, IdOwner, in_order
from mstar_core.gateway.door.kept_ids import FILE, KeptIds
from mstar_core.gateway.parts import Replica
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened


def replicas(*names: str) -> list[Replica]:
    """Return replicas of one model."""
    return [Replica(model="llm", deployment=name, url=f"http://{name}") for name in names]


def names(ordered: list[Replica]) -> list[str]:
    """Return the deployments in their order."""
    return [replica.deployment for replica in ordered]


def test_the_least_load_comes_first() -> None:
    assert names(in_order(replicas("a", "b", "c"), {"a": 2, "b": 1, "c": 3}, None, None)) == ["b", "a", "c"]


def test_a_prefix_attracts_until_its_replica_is_busy() -> None:
    assert names(in_order(replicas("a", "b"), {"a": 4, "b": 0}, None, "a")) == ["a", "b"]
    assert names(in_order(replicas("a", "b"), {"a": 5, "b": 0}, None, "a")) == ["b", "a"]


def test_state_wins_over_load() -> None:
    assert names(in_order(replicas("a", "b"), {"a": 100, "b": 0}, "a", None)) == ["a", "b"]


def test_the_longest_known_prefix_decides() -> None:
    memory = Affinity()
    memory.note_prefix("llm", b"x" * 2000, "a")
    memory.note_prefix("llm", b"x" * 300, "b")
    assert memory.with_prefix("llm", b"x" * 1500) == "a"
    assert memory.with_prefix("llm", b"x" * 300) == "b"
    assert memory.with_prefix("omni", b"x" * 300) is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MOST_OWNERS", 2)
    memory = Affinity()
    for name in ("a", "b", "c"):
        memory.note([name], IdOwner("llm", "r", None))
    assert memory.owner("a") is None and memory.owner("c") is not None


def keeping(model: str, name: str) -> FakeDeployment:
    """Return a deployment that makes a response and finds only its own."""
    made: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "POST":
            await request.content.read()
            made.append(f"resp_{name}{len(made)}")
            return web.json_response({"id": made[-1], "by": name})
        found = request.path.rpartition("/")[2] in made
        return web.json_response({"by": name}, status=200 if found else 404)

    return FakeDeployment(model, name=name, handler=answer)


async def test_a_stored_response_is_read_from_the_replica_that_made_it(opened: Opened) -> None:
    gateway = await opened(keeping("llm", "a"), keeping("llm", "b"), keeping("omni", "c"))
    for _ in range(3):
        _, made = await gateway.json("POST", "/v1/responses", json={"model": "llm", "input": "hello"})
        status, read = await gateway.json("GET", f"/v1/responses/{made['id']}")
        assert (status, read["by"]) == (200, made["by"])
        following: dict[str, Any] = {"model": "llm", "previous_response_id": made["id"], "input": "more"}
        assert (await gateway.json("POST", "/v1/responses", json=following))[1]["by"] == made["by"]


async def test_an_id_that_the_gateway_does_not_know_is_looked_for(opened: Opened) -> None:
    gateway = await opened(keeping("llm", "a"), keeping("omni", "c"))
    _, made = await gateway.json("POST", "/v1/responses", json={"model": "omni", "input": "hello"})
    gateway.door.affinity.owners.clear()
    assert (await gateway.json("GET", f"/v1/responses/{made['id']}"))[1]["by"] == "c"
    assert (await gateway.json("GET", "/v1/responses/resp_nowhere"))[0] == 404


async def test_ids_survive_a_restart_of_the_gateway_and_no_replica_is_asked_in_vain(
    opened: Opened, tmp_path: Path
) -> None:
    fakes = [keeping("llm", "a"), keeping("llm", "b"), keeping("omni", "c")]
    first = await opened(*fakes)
    first.door.affinity.kept = kept = KeptIds(tmp_path)
    _, made = await first.json("POST", "/v1/responses", json={"model": "omni", "input": "hello"})
    body = {"model": "llm", "session_id": "robot-1", "messages": []}
    _, session = await first.json("POST", "/v1/chat/completions", json=body, headers={"Authorization": "Bearer secret"})
    await kept.flush()
    asked: list[str] = []

    def noting(fake: FakeDeployment) -> None:
        answer = fake.handler
        assert answer is not None

        async def note(request: web.BaseRequest) -> web.StreamResponse:
            asked.append(fake.name)
            return await answer(request)

        fake.handler = note

    for fake in fakes:
        await fake.close()
    second = await opened(*fakes)
    second.door.affinity.kept = KeptIds(tmp_path)
    for fake in fakes:
        noting(fake)
    assert (await second.json("GET", f"/v1/responses/{made['id']}"))[1]["by"] == "c"
    ended = await second.json("DELETE", "/v1/sessions/robot-1", headers={"Authorization": "Bearer secret"})
    assert ended[1]["by"] == session["by"] and asked == ["c", session["by"]]
    for fake in fakes:
        fake.model = "renamed" if fake.name == "c" else fake.model
    second.door.affinity.owners.clear()
    assert (await second.json("GET", f"/v1/responses/{made['id']}"))[1]["by"] == "c", "it is looked for"


async def test_the_file_of_ids_is_bounded_and_holds_no_key(tmp_path: Path) -> None:
    kept = KeptIds(tmp_path, most=2)
    memory = Affinity(kept)
    owner = IdOwner("llm", "a", "secret-key", "acme")
    memory.note(["session secret-key s", "resp_1", "ek_token"], owner)
    memory.note(["resp_2"], owner)
    memory.note(["req-1"], owner, is_kept=False)
    await kept.flush()
    memory.owners.clear()
    found = [memory.owner(name) for name in ("session secret-key s", "ek_token", "req-1")]
    assert found == [None] * 3, "the oldest name has left, and the others were never written"
    assert memory.owner("resp_2") == memory.owner("resp_1") == IdOwner("llm", "a", None, "acme")
    await kept.close()
    file = tmp_path / FILE
    assert b"secret" not in file.read_bytes() and stat.S_IMODE(os.stat(file).st_mode) == 0o600
    file.write_bytes(b"damaged" * 500)
    assert KeptIds.opened(tmp_path) is None, "a gateway serves without its memory"


async def test_a_session_stays_at_its_replica(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm", name="a"), FakeDeployment("llm", name="b"))
    body = {"model": "llm", "session_id": "robot-1", "messages": []}
    _, first = await gateway.json("POST", "/v1/chat/completions", json=body)
    gateway.door.loads.own[first["by"]] += 50
    _, second = await gateway.json("POST", "/v1/chat/completions", json=body)
    assert second["by"] == first["by"]
    assert (await gateway.json("DELETE", "/v1/sessions/robot-1"))[1]["by"] == first["by"]
