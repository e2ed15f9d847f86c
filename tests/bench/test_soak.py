"""The soak: its judgement of answers, files and slopes, and its two-minute form."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from bench.soak.answers import Answer, flaws, gaps, prefix_flaws
from bench.soak.crowd import kind_of
from bench.soak.media import unseen
from bench.soak.processes import held_by, slope
from bench.soak.watch import judged
from tests.fakes import media

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("orpheus", "pi05")
KINDS = {"worker", "conductor", "api"}
DEATHS = len(KINDS) * len(FAMILIES)
"""Each kind of process of each deployment dies once."""


def line(modality: str, data: bytes = b"", **metadata: Any) -> dict[str, Any]:
    return {"modality": modality, "data": data, "metadata": metadata}


def sound(begin: int, count: int) -> dict[str, Any]:
    """Return a line of sound whose samples are their own numbers."""
    data = np.arange(begin, begin + count, dtype="<i2").tobytes()
    return line("audio", data, offset_samples=begin, samples=count)


def answer(*lines: dict[str, Any], status: int = 200) -> Answer:
    return Answer(status=status, lines=[line("start"), *lines])


DONE = line("done", finish_reason="stop", usage={"completion_tokens": 4, "total_ms": 3.0})
WHOLE = answer(sound(0, 4), sound(4, 4), DONE)


def test_sound_may_be_cut_into_other_lines() -> None:
    later = line("done", finish_reason="stop", usage={"completion_tokens": 4, "total_ms": 9000.0})
    assert flaws(answer(sound(0, 1), sound(1, 7), later), WHOLE) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((sound(0, 4), sound(5, 3), DONE), "sound at 5, expected 4"),
        ((sound(0, 4), sound(4, 4), sound(4, 4), DONE), "sound at 4, expected 8"),
        ((sound(0, 4), DONE), "8 bytes, expected 16"),
        ((sound(0, 4), sound(4, 4), DONE, DONE), "not whole"),
        ((sound(0, 4), sound(4, 4)), "not whole"),
        ((sound(0, 4), line("error", code="worker_lost")), "worker_lost"),
        ((sound(0, 4), sound(4, 4), line("text", b"!"), DONE), "ports"),
        ((sound(0, 4), sound(4, 4), line("done", finish_reason="length", usage={})), "finish_reason"),
        ((line("start"), sound(0, 4), sound(4, 4), DONE), "2 start lines"),
    ],
)
def test_every_difference_to_the_undisturbed_answer_is_told(lines: tuple[dict[str, Any], ...], words: str) -> None:
    assert words in "; ".join(flaws(answer(*lines), WHOLE))


def test_images_are_compared_one_by_one() -> None:
    two = answer(line("image", b"ab"), line("image", b"c"), DONE)
    assert "differs from byte 0 on" in flaws(answer(line("image", b"ab"), line("image", b"d"), DONE), two)[0]
    assert flaws(answer(line("image", b"abc"), DONE), two) == ["image: 1 outputs, expected 2"]


def test_progress_is_neither_lost_nor_repeated() -> None:
    steps = [line("progress", step=step, steps=3) for step in (1, 2, 3)]
    whole = answer(*steps, line("image", b"ab"), DONE)
    again = answer(*steps[:2], *steps[1:], line("image", b"ab"), DONE)
    assert flaws(again, whole) == ["progress: 4 outputs, expected 3"] and flaws(whole, whole) == []


def test_an_answer_that_was_ended_early_is_a_beginning() -> None:
    assert prefix_flaws(answer(sound(0, 3)), WHOLE) == []
    assert prefix_flaws(answer(sound(0, 3), line("error", code="cancelled")), WHOLE) == []
    other = line("audio", b"\1\1", offset_samples=0, samples=1)
    assert prefix_flaws(answer(other), WHOLE) == ["audio: not the beginning of the reference"]
    assert gaps(answer(sound(2, 3))) == [(1, "sound at 2, expected 0")]


def test_each_request_has_one_outcome() -> None:
    cancelled = answer(line("error", code="cancelled"))
    assert kind_of("whole", WHOLE) == kind_of("closed", WHOLE) == "whole"
    assert kind_of("cancelled by id", cancelled) == "cancelled by id"
    assert kind_of("whole", cancelled) == "cancelled", "no client asked for it"
    assert kind_of("whole", Answer(is_refused=True)) == "no connection"
    assert kind_of("whole", answer(sound(0, 4))) == "cut", "the stream just stops"
    assert kind_of("closed", Answer(has_left=True)) == "closed"
    full = Answer(status=429, body={"error": {"code": "queue_full"}})
    assert kind_of("whole", full) == "queue_full", "it does not say when to come again"
    full.headers["retry-after"] = "1"
    assert kind_of("whole", full) == "refused"


def test_unseen_files_have_other_bytes_and_the_same_content() -> None:
    draws = random.Random(1)
    picture, wave, film = media.image(8, 6), media.wav(0.1, 16_000, 1), media.video(16, 16)
    assert len({picture, unseen(picture, draws), unseen(picture, draws)}) == 3
    assert np.array_equal(*(np.asarray(Image.open(io.BytesIO(each))) for each in (picture, unseen(picture, draws))))
    assert np.array_equal(*(soundfile.read(io.BytesIO(each))[0] for each in (wave, unseen(wave, draws))))
    assert unseen(film, draws).startswith(film) and unseen(b"text", draws) == b"text"


def test_the_slope_of_several_lives_has_a_level_for_each() -> None:
    found = slope([(1, 0, 5.0), (1, 1, 6.0), (1, 2, 7.0), (2, 3, 0.0), (2, 4, 1.0)])
    assert found is not None
    assert (found.per_minute, found.error) == pytest.approx((1.0, 0.0))
    assert slope([(1, 0, 5.0), (2, 1, 6.0)]) is None


def test_a_leak_grows_and_noise_does_not() -> None:
    noise = random.Random(2)
    flat = [(1, minute, 100 + noise.uniform(-5, 5)) for minute in range(60)]
    leak = [(1, minute, value + 0.5 * minute) for _, minute, value in flat]
    assert judged("descriptors", flat, 0.2)["verdict"] == "steady"
    assert judged("descriptors", leak, 0.2)["verdict"] == "grows"
    assert judged("descriptors", leak[:15], 0.2)["verdict"] == "too short"


def test_memory_files_and_descriptors_of_a_process_are_counted() -> None:
    before = held_by("me", os.getpid(), 0.0, 1e9)
    file = os.memfd_create("counted")
    try:
        after = held_by("me", os.getpid(), 0.0, 1e9)
    finally:
        os.close(file)
    assert before is not None and after is not None
    assert (after.memory_files - before.memory_files, after.descriptors - before.descriptors) == (1, 1)
    assert held_by("gone", 2**22 + 1, 0.0, 1e9) is None


@pytest.mark.timeout(400)
def test_two_minutes_of_deaths_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.soak", "--minutes", "2", "--deaths", str(DEATHS), "--load", "0.4"]
    command += ["--families", ",".join(FAMILIES), "--kill-s", "5", "--restart-s", "12", "--lull-s", "15"]
    command += ["--sample-s", "5", "--save", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stderr, done.stdout)
    report = json.loads(path.read_text())
    assert report["failures"] == [] and done.returncode == 0
    assert {death["kind"] for death in report["deaths"]} == KINDS
    assert [restart["exit"] for restart in report["rolling_restarts"]][:1] == [0]
    outcomes = {kind for each in report["deployments"].values() for kind in each["outcomes"]}
    assert {"whole", "closed", "cancelled by id"} <= outcomes, outcomes
