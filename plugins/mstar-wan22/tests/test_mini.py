"""The trained miniature `wan22:mini`: it moves named shapes in named directions, and a broken part is noticed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import judge_moves
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mstar_core.layers import QuantizableLayer
from mstar_core.layers.quantize import quantize
from mstar_core.parallel.shards import WHOLE
from mstar_core.plugin.processor import PromptRequest
from mstar_wan22 import moves
from mstar_wan22.checkpoint.config import TRAINED_STEPS, read_sizes
from mstar_wan22.checkpoint.weights import load
from mstar_wan22.nodes import rotary, solver, transformer
from mstar_wan22.nodes.media import Frames
from mstar_wan22.nodes.solver import HISTORY, Solver
from mstar_wan22.nodes.text import TextEncoder
from mstar_wan22.nodes.transformer import Denoiser, Transformer, keep_floats
from mstar_wan22.params import Params
from mstar_wan22.plugin import MINI
from mstar_wan22.processor import Processor
from mstar_wan22.sources.mini import FOLDER
from tests.runtime.deployment import Deployment

from .test_served_videos import WAN

VIDEOS = 12
LEAST = 0.8
"""Share of few videos that an intact miniature moves right, and a broken one does not."""

Patch = pytest.MonkeyPatch


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Deployment(served=WAN, name="mini", weights_source="mini") as running:
        yield running.url


def test_named_shapes_move_in_named_directions(url: str) -> None:
    with judge_moves.Served(url) as served:
        verdict = judge_moves.judge(served, VIDEOS)
    assert verdict["share"] >= LEAST, verdict


def test_a_given_picture_is_moved_on(url: str) -> None:
    move, radius = moves.Move("red", "circle", "down"), 6.0
    picture = Image.fromarray(moves.render(move, (moves.SIDE / 2, 9.0), radius))
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = {"text": move.sentence, "output_modalities": "video", "seed": 1, **moves.PARAMS}
    files = {"files": ("picture.png", file.getvalue(), "image/png")}
    answer = httpx.post(f"{url}/generate", data=data, files=files, timeout=120)
    events = map(json.loads, answer.raise_for_status().text.splitlines())
    shown = [event["data"] for event in events if event.get("modality") == "video"]
    frames = [np.frombuffer(base64.b64decode(data), np.uint8) for data in shown]
    video = np.concatenate([frame.reshape(-1, moves.SIDE, moves.SIDE, 3) for frame in frames])
    assert moves.shows(video, move)
    assert np.abs(video[0].astype(float) - np.asarray(picture)).mean() < 8


# -- in one process ----------------------------------------------------------------------------------------------------


class Mini:
    """The miniature's nodes, run in the program's order."""

    def __init__(self) -> None:
        sizes = read_sizes(FOLDER)
        self._text, network = TextEncoder(sizes.text), Transformer(sizes.transformer, WHOLE)
        keep_floats(network)
        self.denoiser = Denoiser(network, expands=True)
        self._solver = Solver(sizes.transformer.outputs, torch.device("cpu"))
        self._frames = Frames(sizes.vae, expands=True)
        self._processor = Processor(FOLDER, {})
        parts = (("text_encoder", self._text), ("transformer", network), ("vae_decoder", self._frames))
        for node, module in parts:
            load(module, node, FOLDER, None)

    def read(self, text: str) -> tuple[dict[str, np.ndarray], list[Tensor]]:
        """Return the arrays of a request, and the vectors of both texts."""
        request = PromptRequest(
            text=text, params=Params(**moves.PARAMS), outputs=frozenset({"video"}), max_seq_len=4096
        )
        arrays = dict(self._processor.process_prompt(request).arrays)
        names = ("tokens", "negative_tokens")
        return arrays, [self._text.encoded(torch.tensor(arrays[name]))[-1] for name in names]

    def first_noise(self, arrays: dict[str, np.ndarray], seed: int) -> Tensor:
        return self._solver.noise(arrays["grid"].shape, seed)

    def video(self, text: str, seed: int) -> moves.Pixels:
        """Return a video, as `judge_moves.Served` does."""
        arrays, texts = self.read(text)
        x = self.first_noise(arrays, seed)
        history = x.new_zeros(HISTORY, *x.shape)
        for row in arrays["high"]:
            x, history = solver.advance(x, history, self.denoiser.guided(x, row, texts, None), row)
        memory, frames = torch.empty(0), []
        for number in range(x.shape[1]):
            made = self._frames(latents=[x], memory=[memory], step=np.array([number]))
            memory = made["memory"][0]
            frames.append(made["frames"][0])
        found: moves.Pixels = torch.cat(frames).numpy()
        return found


@pytest.fixture(scope="module")
def mini() -> Mini:
    return Mini()


def share(mini: Any, count: int) -> float:
    return float(judge_moves.judge(mini, count)["share"])


def test_the_parts_alone_move_named_shapes(mini: Mini) -> None:
    assert share(mini, VIDEOS) >= LEAST


@torch.no_grad()
def test_weights_of_eight_bits_stay_near() -> None:
    exact, halved = Mini(), Mini()
    report = quantize(halved.denoiser, "fp8", (QuantizableLayer,))
    assert report.after_bytes < 0.3 * report.before_bytes
    arrays, texts = exact.read("a red circle moves right")
    noise = exact.first_noise(arrays, 1)
    velocities = [mini.denoiser.guided(noise, arrays["high"][0], texts, None) for mini in (exact, halved)]
    assert 0 < float((velocities[1] - velocities[0]).norm() / velocities[0].norm()) < 0.1
    assert share(halved, VIDEOS) >= LEAST


def test_the_parameters_of_the_spec_are_those_of_the_world() -> None:
    assert dict(MINI) == moves.PARAMS


def test_a_request_without_parameters_is_one_of_this_world() -> None:
    plain, named = (
        Processor(FOLDER, {}).process_prompt(
            PromptRequest(text="a red circle", params=params, outputs=frozenset({"video"}), max_seq_len=4096)
        )
        for params in (Params(), Params(**moves.PARAMS))
    )
    assert plain.metadata == named.metadata
    assert plain.arrays.keys() == named.arrays.keys()
    assert all(np.array_equal(plain.arrays[name], named.arrays[name]) for name in plain.arrays)


def reversed_guidance(patch: Patch) -> None:
    true = Denoiser.branches
    patch.setattr(Denoiser, "branches", lambda self, *args: true(self, *args).flip(0))


def rows_for_columns(patch: Patch) -> None:
    true = rotary.angles
    patch.setattr(
        "mstar_wan22.nodes.transformer.angles",
        lambda grid, head_dim, device: true(grid, head_dim, device).view(*grid, -1).transpose(1, 2).flatten(0, 2),
    )


def no_corrector_history(patch: Patch) -> None:
    true = solver.advance
    patch.setattr(solver, "advance", lambda x, history, v, row: true(x, torch.zeros_like(history), v, row))


def reversed_times(patch: Patch) -> None:
    true = transformer.sinusoid
    patch.setattr(transformer, "sinusoid", lambda times, width: true(TRAINED_STEPS - times, width))


@pytest.mark.parametrize("broken", [reversed_guidance, rows_for_columns, no_corrector_history, reversed_times])
def test_a_broken_part_is_noticed(broken: Callable[[Patch], None], mini: Mini, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert share(mini, VIDEOS // 2) < LEAST
