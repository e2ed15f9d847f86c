"""The transformer against the reference: every stage of one pass, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_wan22.nodes.rotary import angles
from mstar_wan22.nodes.transformer import TEXT_ROWS, sinusoid

from .conftest import GOLDEN, close

VECTORS = GOLDEN.tensors("transformer")
CASES = {"ti2v": (True, "clean"), "ti2v_uniform": (True, "dirty"), "a14b": (False, "clean")}
LIMIT = 5e-5


def inputs(case: str) -> tuple[Tensor, Tensor, tuple[int, ...], Tensor]:
    """Return latents, timesteps [B, S], tokens of each, and the text of a case."""
    expands, prompt = CASES[case]
    if f"{case}.output" not in VECTORS:
        pytest.skip(f"runs when MSTAR_GOLDEN names a set with {case} in transformer.safetensors")
    latents, times = VECTORS[f"{case}.in.hidden_states"], VECTORS[f"{case}.in.timestep"]
    grid = latents.shape[2] * (latents.shape[3] // 2) * (latents.shape[4] // 2)
    ids = torch.tensor(GOLDEN.json("text.json")["prompts"][prompt]["input_ids"])
    text = GOLDEN.text_encoder(GOLDEN.of_kind(expands=expands)).encoded(ids)[-1]
    if times.dim() == 1:
        return latents, times[:, None], (grid,), text
    distinct, counts = torch.unique_consecutive(times[0], return_counts=True)
    return latents, distinct.expand(len(latents), -1), tuple(counts.tolist()), text


@pytest.mark.parametrize("case", CASES)
def test_every_stage(case: str) -> None:
    latents, times, spans, text = inputs(case)
    network = GOLDEN.transformer(GOLDEN.of_kind(expands=CASES[case][0]))
    seen: dict[str, Tensor] = {}
    out = network(latents, times, spans, [text] * len(latents), seen)
    close(out, VECTORS[f"{case}.output"], LIMIT)
    last = times.shape[1] - 1
    found: dict[str, Any] = {
        "patch_tokens": seen["patch_tokens"],
        "block_0.self_attn_out": seen["self_attn_out"],
        "block_0.cross_attn_out": seen["cross_attn_out"],
        "block_0.ffn_out": seen["ffn_out"],
        "temb": seen["temb"][:, 0],
        "timestep_proj": seen["timestep_proj"][:, 0],
        "temb_first_last": seen["temb"][:, [0, last]],
        "timestep_proj_first_last": seen["timestep_proj"][:, [0, last]],
        "text_proj_first24": seen["text_proj"][:, :24],
        "text_proj_pad_row": seen["text_proj"][:, TEXT_ROWS - 1],
        **{name: value for name, value in seen.items() if name.startswith("block_")},
    }
    for name, value in found.items():
        if (expected := VECTORS.get(f"{case}.{name}")) is not None:
            close(value, expected, LIMIT)


@pytest.mark.parametrize("case", CASES)
def test_positions_and_times(case: str) -> None:
    latents, times, _, _ = inputs(case)
    grid = (latents.shape[2], latents.shape[3] // 2, latents.shape[4] // 2)
    for name, function in (("rope_cos", torch.cos), ("rope_sin", torch.sin)):
        if (expected := VECTORS.get(f"{case}.{name}")) is not None:
            table = function(angles(grid, expected.shape[-1], torch.device("cpu"))).float()
            close(table.repeat_interleave(2, dim=1), expected, 1e-6)
    for name, chosen in (("sinusoid", times[:, 0]), ("sinusoid_first_last", times[0, [0, -1]])):
        if (expected := VECTORS.get(f"{case}.{name}")) is not None:
            close(sinusoid(chosen, expected.shape[-1]), expected, 1e-5)
