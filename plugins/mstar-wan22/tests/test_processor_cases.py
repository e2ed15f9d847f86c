"""Whole videos against the reference, through processor, program order and nodes: every velocity, latent and frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.plugin.params import param_specs
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_wan22.nodes.solver import HISTORY, advance
from mstar_wan22.params import Params
from mstar_wan22.processor import Processor
from mstar_wan22.request.schedule import Column

from .conftest import GOLDEN, close, denoisers, frame_node, image_node, read_sizes, whole_folder

CASES: dict[str, Any] = GOLDEN.json("cases.json")["cases"]
LATENTS, FRAMES = 2e-4, 5e-4
MOST_OFF = 0.005


def prepared(name: str, folder: Path) -> Inputs:
    """Return what the processor makes of a case."""
    case = CASES[name]
    known = {spec.name for spec in param_specs(Params)}
    given = {key: value for key, value in case["params"].items() if key in known}
    media = []
    if "image" in case:
        media = [MediaPart(modality="image", data=(GOLDEN.folder / case["image"]).read_bytes())]
    params = replace(Params(image_fit="stretch"), **given)
    request = PromptRequest(
        text=case["params"]["prompt"], media=media, params=params, outputs=frozenset({"video"}), max_seq_len=4096
    )
    return Processor(folder, {}).process_prompt(request)


@pytest.mark.parametrize("name", [name for name in CASES if GOLDEN.has(f"{name}.safetensors")])
def test_a_video(name: str, tmp_path: Path) -> None:
    case, vectors = CASES[name], GOLDEN.tensors(name)
    checkpoint = case["checkpoint"]
    sizes = read_sizes(whole_folder(checkpoint, tmp_path))
    inputs = prepared(name, tmp_path)
    text = GOLDEN.text_encoder(checkpoint)
    texts = [text.encoded(torch.tensor(inputs.arrays[key]))[-1] for key in ("tokens", "negative_tokens")]
    condition = _condition(vectors, checkpoint, sizes, inputs)
    experts = denoisers(GOLDEN, checkpoint, sizes)
    rows = [(expert, row) for expert in ("high", "low") for row in inputs.arrays.get(expert, ())]
    names = {"high": "transformer", "low": "transformer_2"}
    assert [names[expert] for expert, _ in rows] == case["expert_per_step"]
    assert [int(row[Column.TIME]) for _, row in rows] == vectors["timesteps"].tolist()
    np.testing.assert_allclose([row[Column.SIGMA] for _, row in rows], vectors["sigmas"][:-1], atol=1e-7)
    x = vectors["init_noise"]
    assert inputs.arrays["grid"].shape == x.shape[1:]
    history = x.new_zeros(HISTORY, *x.shape)
    for number, (expert, row) in enumerate(rows):
        seen, _, _ = experts[expert].conditioned(x, float(row[Column.TIME]), condition)
        if (expected := vectors.get(f"step{number}.model_input")) is not None:
            close(seen, expected, LATENTS)
        branches = experts[expert].branches(x, row, texts, condition)
        close(branches[0], vectors[f"step{number}.v_cond"], LATENTS)
        close(branches[1], vectors[f"step{number}.v_uncond"], LATENTS)
        x, history = advance(x, history, experts[expert].guided(x, row, texts, condition), row)
        close(x, vectors["latents_after_step"][number], LATENTS)
    _check_frames(vectors, case, _decoded(checkpoint, sizes, x, condition))


def _condition(vectors: dict[str, Tensor], checkpoint: str, sizes: Any, inputs: Inputs) -> Tensor | None:
    if "image" not in inputs.arrays:
        return None
    image = torch.from_numpy(inputs.arrays["image"])
    if (resized := vectors.get("image_uint8_resized")) is not None:
        assert torch.equal(image.permute(1, 2, 0), resized)
    node = image_node(GOLDEN, checkpoint, sizes)
    found: Tensor = node(image=[image], grid=[inputs.arrays["grid"]])["condition"][0]
    if (expected := vectors.get("image_latent")) is not None:
        close(found, expected, 1e-4)
    return found


def _decoded(checkpoint: str, sizes: Any, x: Tensor, condition: Tensor | None) -> Tensor:
    """Return the frames as the loop of the decoder gives them: uint8 [F, H, W, 3]."""
    node, memory, frames = frame_node(GOLDEN, checkpoint, sizes), torch.empty(0), []
    for number in range(x.shape[1]):
        shown = None if condition is None else [condition]
        out = node(latents=[x], memory=[memory], step=np.array([number]), condition=shown)
        frames += [out["frames"][0]]
        memory = out["memory"][0]
    return torch.cat(frames)


def _check_frames(vectors: dict[str, Tensor], case: dict[str, Any], frames: Tensor) -> None:
    count, _, height, width = case["frames"]
    assert frames.shape == (count, height, width, 3)
    expected = vectors.get("frames_uint8_trunc")
    sparse = frames.permute(0, 3, 1, 2)[..., ::4, ::4].float() / 127.5 - 1
    close(sparse, vectors["frames_stride4"], FRAMES + 1 / 127)  # frames are whole numbers here
    if expected is not None:
        off = (frames.int() - expected.int()).abs()
        assert int(off.max()) <= 1
        assert float((off > 0).float().mean()) <= MOST_OFF
