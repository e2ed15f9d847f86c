"""LoRA adapters of `llm:tiny` on two tensor-parallel CPU ranks: loaded and unloaded under way, and kept by a stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import LoraConfig
from mstar_core.conformance.runtime import LocalRuntime
from mstar_llm.checkpoint.config import read_config
from mstar_llm.decoder import LanguageModel
from mstar_llm.plugin import bind, llm
from tests.fakes.adapters import merge, write_adapter
from tests.runtime.deployment import Deployment, until

from .test_served import CHAT, LIMIT_S, LLM

TP2: Final = Plan(
    ranks=(
        RankPlan(rank=0, device="cpu", nodes=("LLM",), memory_fraction=0.4),
        RankPlan(rank=1, device="cpu", nodes=(), follows=("LLM",), memory_fraction=0.4),
    ),
    placements=(NodePlacement(node="LLM", replicas=((0, 1),), tp_size=2),),
    groups=(GroupPlan(ranks=(0, 1), nodes=("LLM",)),),
)
NAMES: Final = ("first", "second", "third")
ROOM: Final = 2
RANK: Final = 4
QUESTION: Final = "How much is one and two, and why is it not four on a day like this?"
LENGTH: Final = 24
LONG: Final = 160


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    """Folders of adapters, by name."""
    base, module = tmp_path_factory.mktemp("adapters"), loaded(tiny_folder)
    return {name: write_adapter(base / name, module, seed, rank=RANK, alpha=4.0) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def merged(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, folders: dict[str, Path]
) -> dict[str, LocalRuntime]:
    """One rank for each adapter, whose weights it has merged, and for the base, `llm`."""
    return {"llm": runtime(tiny_folder)} | {
        name: runtime(merged_folder(tmp_path_factory.mktemp(name) / "llm", tiny_folder, folder))
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Deployment]:
    """A deployment with room for two adapters and none loaded."""
    with Deployment(served=LLM, where=TP2, lora=LoraConfig(max_adapters=ROOM, max_rank=8)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


def loaded(folder: Path) -> LanguageModel:
    """Return the decoder of a checkpoint."""
    module = LanguageModel(read_config(folder), has_head=True)
    module.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return module


def merged_folder(target: Path, base: Path, adapter: Path) -> Path:
    """Write a checkpoint with an adapter in its weights."""
    shutil.copytree(base, target)
    module = loaded(base)
    merge(module, adapter, 4.0 / RANK)
    weights = load_file(base / "model.safetensors")
    save_file({name: module.state_dict()[name].contiguous() for name in weights}, target / "model.safetensors")
    return target


def runtime(folder: Path) -> LocalRuntime:
    return LocalRuntime(bind(llm(read_config(folder)), folder, {}), folder)


def wanted(runtime: LocalRuntime, length: int = LENGTH) -> str:
    """Return the text of a runtime."""
    params = {"temperature": 0.0, "max_output_tokens": length, "ignore_eos": True}
    return runtime.request(QUESTION, params, outputs=("text",)).outputs["text"].decode()


def body(model: str, length: int = LENGTH) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": length, "ignore_eos": True}


def answer(client: httpx.Client, model: str) -> str:
    """Return the whole text of an answer."""
    response = client.post(CHAT, json=body(model))
    assert response.status_code == 200, response.text
    return said(response.json()["choices"][0]["message"])


def said(message: dict[str, Any]) -> str:
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def ended(server: Deployment, record: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of an operation and return its record."""
    number = record["operation"]["number"]

    def look() -> dict[str, Any] | None:
        latest = server.admin("/v1/")["operation"]
        return latest if latest["number"] == number and latest["state"] != "running" else None

    return until(look, "the end of the operation")


def load(server: Deployment, name: str, folder: Path) -> dict[str, Any]:
    """Load an adapter by the admin socket and return the record of the ended operation."""
    return ended(server, server.admin("/v1/adapters", "POST", {"name": name, "folder": str(folder)}))


def listed(server: Deployment) -> dict[str, int]:
    """Return the rows of the loaded adapters by name."""
    return {each["name"]: each["row"] for each in server.admin("/v1/adapters")["items"]}


def test_adapters_change_on_two_ranks_while_the_deployment_serves(
    server: Deployment, client: httpx.Client, folders: dict[str, Path], merged: dict[str, LocalRuntime]
) -> None:
    texts = {name: wanted(each) for name, each in merged.items()}
    assert len(set(texts.values())) == len(texts)
    assert answer(client, "llm") == texts["llm"]
    assert client.post(CHAT, json=body("first")).status_code == 404
    for name in ("first", "second"):
        assert load(server, name, folders[name])["error"] == ""
    assert listed(server) == {"first": 0, "second": 1}
    assert {name: answer(client, name) for name in ("llm", "first", "second")} == {
        name: texts[name] for name in ("llm", "first", "second")
    }
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        load(server, "third", folders["third"])
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        server.admin("/v1/adapters/third", "DELETE")

    # An unloaded adapter is refused, serves the request that it has, and leaves its row to the next one.
    with client.stream("POST", CHAT, json={**body("first", LONG), "stream": True}) as response:
        lines = response.iter_lines()
        begun = next(text for text in map(text_of, lines) if text)
        record = server.admin("/v1/adapters/first", "DELETE")
        until(lambda: "first" not in listed(server), "the adapter's end in the list")
        # The api may hear of it a moment later than the list.
        until(lambda: client.post(CHAT, json=body("first")).status_code == 404, "the refusal of new requests")
        text = begun + "".join(map(text_of, lines))
    assert text == wanted(merged["first"], LONG)
    assert ended(server, record)["error"] == ""
    assert load(server, "third", folders["third"])["error"] == ""
    assert listed(server) == {"second": 1, "third": 0}
    assert {name: answer(client, name) for name in ("llm", "second", "third")} == {
        name: texts[name] for name in ("llm", "second", "third")
    }


def test_a_folder_that_cannot_be_loaded_is_named_and_leaves_the_room_free(
    server: Deployment, client: httpx.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    for name in listed(server):
        assert ended(server, server.admin(f"/v1/adapters/{name}", "DELETE"))["error"] == ""
    wide = write_adapter(tmp_path / "wide", torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8)}), 1)
    assert "wide" in load(server, "wide", wide)["error"]
    assert listed(server) == {}
    assert client.post(CHAT, json=body("wide")).status_code == 404
    assert load(server, "second", folders["second"])["error"] == ""
    assert listed(server) == {"second": 0}


def test_a_stream_goes_on_with_its_adapter_after_a_death(
    server: Deployment, client: httpx.Client, folders: dict[str, Path], merged: dict[str, LocalRuntime]
) -> None:
    if "second" not in listed(server):
        assert load(server, "second", folders["second"])["error"] == ""
    restarts, text, texts = server.admin("/v1")["restarts"], wanted(merged["second"], LONG), 0
    heard = ""
    with client.stream("POST", CHAT, json={**body("second", LONG), "stream": True}) as response:
        for line in response.iter_lines():
            part = text_of(line)
            heard, texts = heard + part, texts + bool(part)
            if part and texts == 4:
                server.kill(server.pids()["worker-0"])
    assert heard == text
    assert server.has_event("request.resumed")
    server.wait_again_ready(restarts + 1)
    server.assert_clean()


def text_of(line: str) -> str:
    """Return the text of a line of a stream."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return said(choices[0]["delta"]) if choices else ""
