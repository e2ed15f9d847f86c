"""The reference's numbers over HTTP: uploads into a deployment of processes, actions back."""

from __future__ import annotations

import concurrent.futures
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mstar_core.config.resolved import KVCacheConfig
from mstar_core.workloads.media import png
from mstar_pi05.request.conversion import unnormalise
from mstar_pi05.robots.statistics import Moments
from tests.runtime.deployment import Deployment, Served

from .conftest import ITEMS

OWN_TIMES = 2e-4
"""Tolerance of actions with the plugin's own times, float32. Source: README of the vectors."""

PI05 = Served(
    model="pi05",
    plugin="pi05",
    nodes=("vit_encoder", "LLM"),
    settings={"max_seq_len": 1024, "kv_cache": KVCacheConfig(pages=256)},
)


def tokenizer(vocab: int) -> Tokenizer:
    """Return a tokenizer that reads `t17 t4` as the ids 17 and 4, so that any ids can be sent as text."""
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"t{number}": number for number in range(3, vocab)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def moments(golden: Any) -> dict[str, list[float]]:
    """Return the set's statistics. They are those of the state, and the tests use them for actions too."""
    return dict(golden.prepost["normalisation"]["norm_stats"]["norm_stats"]["state"])


def lay_out(golden: Any, folder: Path) -> Path:
    """Write the reference's model as an openpi folder with its statistics and this tokenizer."""
    asset = folder / "assets" / "golden"
    asset.mkdir(parents=True)
    shutil.copyfile(golden.folder / "config.json", folder / "config.json")
    shutil.copyfile(golden.folder / "weights.safetensors", folder / "model.safetensors")
    (asset / "norm_stats.json").write_text(
        json.dumps({"norm_stats": dict.fromkeys(("state", "actions"), moments(golden))})
    )
    tokenizer(int(golden.config["vocab_size"])).save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Robot:
    """Client that sends the reference's items to a deployment."""

    server: Deployment
    golden: Any
    files: dict[str, Any] = field(default_factory=dict)

    def act(self, item: int, files: list[Any] | None = None, **fields: str) -> np.ndarray:
        golden = self.golden
        ids = golden.prompt(item).tolist()
        assert ids[0] == 2
        given = {
            "text": " ".join(f"t{each}" for each in ids[1:]),
            "num_steps": str(golden.steps),
            "streaming": "false",
            "noise": json.dumps(golden.inputs["noise"][item].tolist()),
            "return_normalized": "true",
            **fields,
        }
        answer = httpx.post(
            f"{self.server.url}/generate",
            data=given,
            files=files or arrays(golden.images(item).numpy()),
            timeout=120,
            headers={"accept": "application/x-mstar-frames"},
        )
        assert answer.status_code == 200, answer.text
        header, data = frames(answer.content)["action"]
        self.files = header
        return np.frombuffer(data, header["dtype"]).reshape(header["shape"])


def frames(body: bytes) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Parse the lines of a binary response: metadata and payload by modality."""
    found, at = {}, 0
    while at < len(body):
        head, size = int.from_bytes(body[at : at + 4], "little"), int.from_bytes(body[at + 4 : at + 12], "little")
        header = json.loads(body[at + 12 : at + 12 + head])
        found[header["modality"]] = header["metadata"], body[at + 12 + head : at + 12 + head + size]
        at += 12 + head + size
    return found


def arrays(images: np.ndarray) -> list[Any]:
    """Return images [c, h, w, 3] of -1 to 1 as uploads of floats in [0, 1]."""
    return [("files", (f"{number}.npy", npy((image + 1) / 2))) for number, image in enumerate(images)]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="module")
def robot(golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    folder = lay_out(golden, tmp_path_factory.mktemp("served") / "checkpoint")
    with Deployment(served=PI05, folder=folder, model_kwargs={"state_in_prompt": False}) as running:
        yield Robot(running, golden)
        running.assert_clean()


def check(made: np.ndarray, golden: Any, item: int) -> None:
    np.testing.assert_allclose(made, golden.expected["actions"][item].numpy(), atol=OWN_TIMES, rtol=0)


@pytest.mark.parametrize("item", ITEMS)
def test_actions_over_http_equal_the_reference(item: int, robot: Robot, golden: Any) -> None:
    check(robot.act(item), golden, item)
    assert robot.files["normalized"] is True


def test_mixed_requests_at_once_equal_the_reference(robot: Robot, golden: Any) -> None:
    """Different camera counts and prompt lengths share passes, and the results do not change."""
    items = [ITEMS[number % len(ITEMS)] for number in (0, 1, 1, 0, 2, 1, 0, 2)]
    with concurrent.futures.ThreadPoolExecutor(len(items)) as threads:
        for item, actual in zip(items, threads.map(robot.act, items), strict=True):
            check(actual, golden, item)


def test_a_camera_that_is_masked_is_as_one_that_is_missing(robot: Robot, golden: Any) -> None:
    masks = golden.inputs["image_masks"]
    item = next((index for index in ITEMS if not masks[index].all()), None)
    if item is None:
        pytest.skip("runs when MSTAR_GOLDEN names a set that masks a camera")
    every = golden.inputs["images"][item].permute(0, 2, 3, 1).contiguous().numpy()
    actual = robot.act(item, arrays(every), image_mask=json.dumps(masks[item].tolist()))
    check(actual, golden, item)


def test_actions_leave_in_the_robots_units_by_the_checkpoints_statistics(robot: Robot, golden: Any) -> None:
    low, high = (tuple(moments(golden)[key]) for key in ("q01", "q99"))
    expected = unnormalise(
        golden.expected["actions"][0].numpy().astype(np.float64), Moments(span="range", low=low, high=high)
    )
    actual = robot.act(0, return_normalized="false")
    widest = float(np.max(np.subtract(high, low))) / 2
    np.testing.assert_allclose(actual, expected, atol=OWN_TIMES * max(1.0, widest), rtol=0)
    assert robot.files["normalized"] is False


def test_noise_and_images_may_be_arrays_of_a_file(robot: Robot, golden: Any) -> None:
    files = [*arrays(golden.images(-1).numpy()), ("files", ("n.npy", npy(golden.inputs["noise"][-1].numpy())))]
    inputs = {"text": " ".join(f"t{each}" for each in golden.prompt(-1).tolist()[1:]), "return_normalized": "true"}
    answer = httpx.post(
        f"{robot.server.url}/generate",
        data={**inputs, "num_steps": str(golden.steps), "output_format": "npy"},
        files=files,
        headers={"accept": "application/x-mstar-frames"},
        timeout=120,
    )
    header, data = frames(answer.content)["action"]
    check(np.load(io.BytesIO(data)), golden, -1)
    assert header["format"] == "npy"


@pytest.mark.parametrize("way", ["uint8", "float"])
def test_images_of_any_size_are_fitted_as_in_the_reference(way: str, robot: Robot, golden: Any) -> None:
    """The original image and the reference's resized image give the same actions."""
    cases = load_file(golden.folder / "images.safetensors")
    side = int(golden.config["vision"]["image_size"])
    names = [name for name in cases if name.startswith("uint8_in")]
    assert names
    for name in names:
        whole = cases[name][0].numpy()
        small = cases[name.replace("uint8_in", f"{way}_out")][0].numpy()
        assert small.shape == (side, side, 3)
        if way == "uint8":
            first, second = ([("files", ("a.png", png(each)))] for each in (whole, small))
        else:
            first = [("files", ("a.npy", npy(whole.astype(np.float32) / np.float32(255))))]
            second = arrays(small[None])
        np.testing.assert_allclose(robot.act(0, first), robot.act(0, second), atol=0 if way == "uint8" else 1e-4)
