"""A new worker that computes other numbers than the dead one: the text that the client has stays as it is."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bench.soak.answers import Answer
from mstar_qwen3omni.checkpoint.shipped import FOLDER
from tests.survival.families import FAMILIES, LONG
from tests.survival.judge import Judge
from tests.survival.mortal import Mortal
from tests.survival.points import WORKER
from tests.survival.strikes import Strike

COUNT, BEFORE = 24, 12
"""Ids of the answer, and the outputs before the death."""

REQUEST = {
    "text": "How many shapes are there?",
    "output_modalities": ["text"],
    "model_kwargs": {**LONG, "temperature": 1.0, "max_output_tokens": COUNT, "seed": 3},
}
HEAD = "thinker.lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the checkpoint, which a test may change."""
    return Path(shutil.copytree(FOLDER, tmp_path / "checkpoint"))


@pytest.fixture
def judge(folder: Path) -> Iterator[Judge]:
    with Mortal(FAMILIES["qwen3_omni"], folder=folder, weights_source="folder") as running:
        yield Judge(running, {"text": REQUEST})


def shuffle_head(folder: Path) -> None:
    """Give every id the logit of another one. A process that has loaded the file keeps what it has."""
    values = load_file(folder / "model.safetensors")
    values[HEAD] = values[HEAD].roll(37, 0).contiguous()
    save_file(values, folder / "changed.safetensors", {"format": "pt"})
    (folder / "changed.safetensors").replace(folder / "model.safetensors")


API = Strike(victim="api", sender="api", message="NewRequest", attempt=2)
"""The api dies too, when it sends the request again: the next one knows the ids from the recording alone."""


@pytest.mark.parametrize("others", [(), (API,)], ids=["worker", "worker-api"])
async def test_other_weights_after_a_death_never_change_what_was_delivered(
    judge: Judge, folder: Path, others: tuple[Strike, ...]
) -> None:
    reference = await judge.undisturbed("text")
    await asyncio.to_thread(shuffle_head, folder)
    strike = Strike(victim=WORKER, sender=WORKER, message="Outputs", count=BEFORE)
    answer = await judge.disturbed("text", strike, *others)
    assert answer.is_whole
    tokens = [each.ends[0]["metadata"]["usage"]["completion_tokens"] for each in (answer, reference)]
    assert tokens == [COUNT, COUNT], "no id is lost or repeated"
    given, expected = (b"".join(each.ports["text"]) for each in (answer, reference))
    delivered = before_pause(answer)
    assert delivered and expected.startswith(delivered) and given.startswith(delivered), (given, expected)
    assert given != expected, "the new worker computes other numbers"


def before_pause(answer: Answer) -> bytes:
    """Return the text that the client had when the longest pause began."""
    pauses = [after - before for before, after in pairwise(answer.line_s)]
    lines = answer.lines[: pauses.index(max(pauses)) + 1]
    return b"".join(line["data"] for line in lines if line["modality"] == "text")
