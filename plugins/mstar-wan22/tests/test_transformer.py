"""The transformer against the reference: every stage of one pass, on one rank and on two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.conformance.two_ranks import ThreadCollectives, ThreadMeeting
from mstar_core.parallel.shards import Shard
from mstar_wan22.nodes.rotary import angles
from mstar_wan22.nodes.transformer import TEXT_ROWS, Denoiser, sinusoid
from mstar_wan22.request.schedule import step_table

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


@pytest.mark.parametrize(("branches", "exchanges"), [(2, 1), (1, 9)])
def test_two_ranks_share_a_video_by_branches_or_by_tokens(branches: int, exchanges: int) -> None:
    """A layer's division of tokens takes four exchanges, and the last one returns all tokens."""
    checkpoint, meeting = GOLDEN.of_kind(expands=False), ThreadMeeting()
    table, _ = step_table(4, 5.0, (5.0, 5.0), None, "diffusers", "unipc")
    network = GOLDEN.transformer(checkpoint)
    draw = torch.Generator().manual_seed(1)
    latents = torch.randn((network.proj_out.out_features // network.patch_tokens, 3, 4, 6), generator=draw)
    width = network.condition_embedder.text_embedder.linear_1.in_features
    texts = [torch.randn((count, width), generator=draw) for count in (5, 3)][:branches]

    def guided(rank: int) -> tuple[Tensor, int]:
        collectives = ThreadCollectives(meeting, rank)
        part = GOLDEN.transformer(checkpoint, shard=Shard(index=rank, size=2, collectives=collectives))
        with torch.no_grad():
            return Denoiser(part, expands=False).guided(latents, table[1], texts, None), collectives.count

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(guided, range(2)))
    with torch.no_grad():
        wanted = Denoiser(network, expands=False).guided(latents, table[1], texts, None)
    for velocity, count in found:
        close(velocity, wanted, LIMIT)
        assert count == exchanges
