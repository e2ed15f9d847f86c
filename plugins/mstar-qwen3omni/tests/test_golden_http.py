"""The reference's text, codes and sound over HTTP: prompts as ids and tensors into a deployment of processes."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.deployment import Deployment, Served, plan

from .conftest import CASES, Golden

NODES = ("audio_encoder", "vision_encoder", "Thinker", "Talker", "Code2Wav")
OMNI = Served(
    model="qwen3_omni",
    plugin="qwen3_omni",
    package="qwen3omni",
    nodes=NODES,
    settings={"max_seq_len": 1024, "kv_cache": KVCacheConfig(pages=512)},
)
TWO_RANKS = {0: NODES[:3], 1: NODES[3:]}
PLACEMENTS = {
    "one rank": {0: NODES},
    "three ranks": {0: NODES[2:3], 1: NODES[3:4], 2: (*NODES[:2], NODES[4])},
    "two speakers": {0: NODES[:3], 1: NODES[3:], 2: NODES[3:]},
}
GREEDY = {
    "temperature": 0,
    "talker_temperature": 0,
    "code_predictor_temperature": 0,
    "top_p": 1,
    "talker_top_k": 0,
    "talker_top_p": 1,
    "code_predictor_top_k": 0,
    "code_predictor_top_p": 1,
}
WAVE_STEPS = 4
"""Tolerance of sound in 16-bit steps: 1e-4 absolute (README of the vectors) and the rounding to integers."""


@dataclass(frozen=True)
class Heard:
    """An answer. text: ids as numbers, because the checkpoint has no tokenizer. pcm: int16 samples."""

    text: str
    pcm: np.ndarray
    done: dict[str, Any]


def lay_out(golden: Golden, folder: Path, stop_id: int) -> Path:
    """Write the set's checkpoint with this stop id of text."""
    folder.mkdir(parents=True)
    config = {**golden.json("config.json"), "im_end_token_id": stop_id}
    (folder / "config.json").write_text(json.dumps(config))
    weights = golden.folder / "model.safetensors"
    if not weights.is_file():
        pytest.skip("the weights are not part of this golden set; MSTAR_GOLDEN names the whole one")
    shutil.copyfile(weights, folder / weights.name)
    return folder


def arrays(case: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the tensors of a case in the order of its prompt: images, videos with their sound, then other sound."""
    found: list[np.ndarray] = []
    for pixels, grid in (("in.pixel_values", "in.image_grid_thw"), ("in.pixel_values_videos", "in.video_grid_thw")):
        if pixels in case:
            found += [case[pixels], case[grid][0]]
    if "in.input_features" in case:
        found.append(case["in.input_features"][0][:, case["in.feature_attention_mask"][0] > 0])
    return found


def form(golden: Golden, name: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a case's request: greedy, with the lengths of the set."""
    case = golden.case(name)
    params = {
        **GREEDY,
        "prompt_token_ids": case["in.input_ids"].tolist(),
        "max_output_tokens": len(case["thinker_tokens"]),
        "talker_max_tokens": case["codes"].shape[1],
        "voice": golden.voice,
        "use_audio_in_video": name == "audio_in_video",
        **more,
    }
    if "in.video_second_per_grid" in case:
        params["fps"] = 2 / float(case["in.video_second_per_grid"][0])
    return {"model_kwargs": json.dumps(params), "output_modalities": "text,audio", "streaming": "true"}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def ask(server: Deployment, golden: Golden, name: str, **more: Any) -> Heard:
    """Send a case and read its stream to the end."""
    files = [("files", (f"{number}.npy", npy(array))) for number, array in enumerate(arrays(golden.case(name)))]
    data = {**form(golden, name, **more), "stream_events": "full"}
    answer = httpx.post(f"{server.url}/generate", data=data, files=files or None, timeout=120)
    assert answer.status_code == 200, answer.text
    text, pcm, done = "", b"", {}
    for line in map(json.loads, answer.text.splitlines()):
        match line["modality"]:
            case "text":
                text += base64.b64decode(line["data"]).decode()
            case "audio":
                pcm += base64.b64decode(line["data"])
            case "done":
                done = line["metadata"]
            case "error":
                raise AssertionError(line)
    return Heard(text, np.frombuffer(pcm, "<i2"), done)


def written(golden: Golden, name: str) -> str:
    """Return the text of a case: its ids without the stop id."""
    case = golden.case(name)
    stop = int(case["in.thinker_eos_token_id"])
    return " ".join(str(token) for token in case["thinker_tokens"].tolist() if token != stop)


def assert_case(golden: Golden, name: str, heard: Heard) -> None:
    """Compare text exactly and sound within the tolerance of the set."""
    assert heard.text.split() == written(golden, name).split()
    expected = np.clip(golden.case(name)["waveform"], -1, 1) * 32767
    assert len(heard.pcm) == len(expected)
    assert np.abs(heard.pcm.astype(np.float64) - expected).max() <= WAVE_STEPS


@pytest.fixture(scope="module")
def folder(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(golden, tmp_path_factory.mktemp("omni") / "checkpoint", golden.config.ids.im_end)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Deployment]:
    with Deployment(served=OMNI, folder=folder, where=plan(TWO_RANKS)) as running:
        yield running


def stop_of(golden: Golden, name: str) -> int:
    """Return the id that ends the text of a case."""
    return int(golden.case(name)["in.thinker_eos_token_id"])


def plain_cases(golden: Golden) -> list[str]:
    """Return the set's cases with the checkpoint's own stop id."""
    return [name for name in CASES if stop_of(golden, name) == golden.config.ids.im_end]


def stopped_case(golden: Golden) -> str:
    """Return a case with another stop id, at which its text ends. Skips the test if the set lacks one."""
    for name in CASES:
        stop = stop_of(golden, name)
        if stop != golden.config.ids.im_end and golden.case(name)["thinker_tokens"][-1] == stop:
            return name
    pytest.skip("this golden set has no case that stops at an id of its own")


def test_every_case_alone(golden: Golden, server: Deployment) -> None:
    for name in plain_cases(golden):
        assert_case(golden, name, ask(server, golden, name))
    server.assert_clean()


def test_all_cases_at_once(golden: Golden, server: Deployment) -> None:
    check_all_at_once(golden, server)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_placements_agree(placement: str, golden: Golden, folder: Path) -> None:
    with Deployment(served=OMNI, folder=folder, where=plan(PLACEMENTS[placement])) as running:
        check_all_at_once(golden, running)


def check_all_at_once(golden: Golden, server: Deployment) -> None:
    names = plain_cases(golden)
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(server, golden, name), names))
    for name, heard in zip(names, answers, strict=True):
        assert_case(golden, name, heard)
    server.assert_clean()


def test_pieces_of_sound_join_without_a_gap(golden: Golden, server: Deployment) -> None:
    whole = ask(server, golden, "text", codec_first_frames=300, codec_chunk_frames=300)
    pieces = ask(server, golden, "text", codec_first_frames=2, codec_chunk_frames=3, codec_left_context_frames=25)
    assert len(pieces.pcm) == len(whole.pcm)
    assert np.abs(pieces.pcm.astype(np.int32) - whole.pcm).max() <= WAVE_STEPS


def test_text_alone_equals_text_beside_sound(golden: Golden, server: Deployment) -> None:
    data = {**form(golden, "text"), "output_modalities": "text", "streaming": "false"}
    answer = httpx.post(f"{server.url}/generate", data=data, timeout=120)
    assert answer.status_code == 200, answer.text
    [output] = answer.json()["outputs"]["text"]
    assert base64.b64decode(output["data"]).decode().split() == written(golden, "text").split()
    server.assert_clean()


def test_a_stop_id_ends_text_and_is_not_spoken(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = stopped_case(golden)
    case = golden.case(name)
    checkpoint = lay_out(golden, tmp_path_factory.mktemp("omni-eos") / "checkpoint", stop_of(golden, name))
    with Deployment(served=OMNI, folder=checkpoint) as running:
        assert_case(golden, name, ask(running, golden, name))
        longer = form(golden, name, max_output_tokens=2 * len(case["thinker_tokens"]))
        data = {**longer, "output_modalities": "text", "streaming": "false"}
        answer = httpx.post(f"{running.url}/generate", data=data, timeout=120).json()
        assert answer["finish_reason"] == "stop"
        running.assert_clean()
