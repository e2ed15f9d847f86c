"""Datasets from files: conversations with the lengths of their answers, texts to speak, and errors by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.errors import ConfigError, UsageError
from mstar_core.plugin.offers import WorkloadSpec
from mstar_core.workloads import ServedModel
from mstarctl.bench.load.datasets import dataset_workload
from mstarctl.bench.load.workloads import GENERIC
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.selftest import null_target
from mstarctl.main import run

DATA = Path(__file__).parent / "data"
OWN = ServedModel(name="x", endpoints=("/generate",))
OMNI = WorkloadSpec(
    name="tts-short", title="", target="mstar_core.workloads.generic:speech", options={"outputs": ("text", "audio")}
)
ORPHEUS = WorkloadSpec(
    name="tts-short", title="", target="mstar_core.workloads.generic:speech", options={"ids_per_word": 30}
)


def test_conversations_become_chats_with_the_lengths_of_their_answers() -> None:
    workload = dataset_workload(f"sharegpt:{DATA / 'conversations.json'}", GENERIC)
    first, second = workload.requests(OWN, 0, 2)
    lengths = {request.text: request.params["max_output_tokens"] for request in (first, second)}
    assert lengths == {"Which river flows through this town?": 13, "Count to three.": 4}
    assert first.params["ignore_eos"] and first.outputs == ("text",)
    foreign = workload.requests(ServedModel(name="x"), 0, 2)
    assert all(set(request.params) == {"max_tokens"} for request in foreign)


def test_a_tokenizer_counts_the_answers() -> None:
    workload = dataset_workload(f"sharegpt:{DATA / 'conversations.json'}", GENERIC, len)
    assert {request.params["max_output_tokens"] for request in workload.requests(OWN, 0, 2)} == {48, 13}


def test_conversations_that_do_not_fit_the_model_are_left_out() -> None:
    workload = dataset_workload(f"sharegpt:{DATA / 'conversations.json'}", GENERIC)
    small = ServedModel(name="x", endpoints=("/generate",), max_model_len=10)
    assert {request.text for request in workload.requests(small, 0, 6)} == {"Count to three."}
    with pytest.raises(UsageError, match="no conversation"):
        workload.requests(ServedModel(name="x", max_model_len=2), 0, 1)


def test_texts_are_spoken_as_the_models_own_workload_asks() -> None:
    name = f"seedtts:{DATA / 'meta.lst'}"
    texts = {"The boat leaves at nine from the old pier.", "Bring a coat, because the evening is cold."}
    plain = dataset_workload(name, ()).requests(OWN, 0, 2)
    assert {request.text for request in plain} == texts and {request.outputs for request in plain} == {("audio",)}
    assert {request.outputs for request in dataset_workload(name, (OMNI,)).requests(OWN, 0, 2)} == {("text", "audio")}
    spoken = dataset_workload(name, (ORPHEUS,)).requests(OWN, 0, 2)
    assert {request.params["max_output_tokens"] for request in spoken} == {270, 240}


def test_a_seed_decides_the_order() -> None:
    workload = dataset_workload(f"seedtts:{DATA / 'meta.lst'}", ())
    orders = {tuple(request.text for request in workload.requests(OWN, seed, 8)) for seed in range(4)}
    assert len(orders) > 1 and workload.requests(OWN, 1, 8) == workload.requests(OWN, 1, 8)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("sharegpt", '[\n{"conversations": [}]\n', ":2 is not JSON"),
        ("sharegpt", '{"a": 1}', ":1 is not a list"),
        ("sharegpt", '[\n {"conversations": []},\n\n {"turns": []}\n]', ":4 item 1 is not a conversation"),
        ("sharegpt", "[]", "contains no conversation"),
        ("seedtts", "a|b|c|text\na|b\n", ":2 is not a line"),
        ("seedtts", "a|b|c| \n", ":1 is not a line"),
        ("seedtts", "\n", "contains no texts"),
    ],
)
def test_broken_files_are_named_with_their_lines(tmp_path: Path, kind: str, content: str, message: str) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        list(dataset_workload(f"{kind}:{file}", GENERIC).requests(OWN, 0, 1))
    assert f"{file}" in str(raised.value) and message in str(raised.value)


@pytest.mark.parametrize("name", ["shargpt:x", "sharegpt", "sharegpt:", ":x"])
def test_unknown_kinds_are_usage_errors(name: str) -> None:
    with pytest.raises(UsageError, match="--dataset is") as raised:
        dataset_workload(name, GENERIC)
    assert "sharegpt:FILE.json" in raised.value.hint


def test_a_dataset_is_served(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with null_target(NullBehaviour()) as target:
        words = ["bench", "run", "--url", target.url, "--concurrency", "1", "--requests", "2", "--warmup", "0", "-q"]
        words += ["--dataset", f"sharegpt:{DATA / 'conversations.json'}", "--no-check", "--out", str(out)]
        assert run(words) == 0
        assert run([*words, "--workload", "chat"]) == 2
    assert ResultFolder.opened(out).facts["workload"]["name"] == "conversations"
