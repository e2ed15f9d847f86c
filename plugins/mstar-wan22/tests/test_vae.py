"""Both autoencoders against the reference: whole videos, chunks and their caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mstar_wan22.nodes.media import levels
from mstar_wan22.nodes.vae_parts import Memory

from .conftest import GOLDEN, close

KINDS = {"vae22": True, "vae21": False}
LIMIT = 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_encoding(kind: str) -> None:
    vectors, encoder = GOLDEN.tensors(kind), GOLDEN.encoder(GOLDEN.of_kind(expands=KINDS[kind], part="vae"))
    video = levels(vectors["encode.in.video_uint8"], torch.float32)
    channels = encoder.sizes.channels
    moments = encoder.moments(video)
    close(moments[:channels], vectors["encode.mean"], LIMIT)
    close(moments[channels:].clamp(-30, 20), vectors["encode.logvar"], LIMIT)
    close(encoder.encode(video), vectors["encode.normalised_mode"], LIMIT)
    close(encoder.moments(video[:, :1])[:channels], vectors["encode.mean_first_frame_alone"], LIMIT)
    memory = torch.empty(0)
    for number, (start, stop) in enumerate(((0, 1), (1, 1 + encoder.sizes.frames))):
        seen: dict[str, Tensor] = {}
        _, memory = encoder.chunk(video[:, start:stop], memory, seen)
        _compare(vectors, f"encode.chunk{number}", seen)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding(kind: str) -> None:
    vectors, decoder = GOLDEN.tensors(kind), GOLDEN.decoder(GOLDEN.of_kind(expands=KINDS[kind], part="vae"))
    latents = vectors["decode.in.latents"]
    close(decoder.denormalised(latents), vectors["decode.denormalised"], LIMIT)
    memory, posts, frames = torch.empty(0), [], []
    for number in range(latents.shape[1]):
        seen: dict[str, Tensor] = {}
        shown, memory = decoder.chunk(latents[:, number : number + 1], memory, seen)
        posts.append(seen.pop("post_quant")[0])
        frames.append(shown)
        _compare(vectors, f"decode.chunk{number}", seen)
        if number == 1:
            _check_memory(vectors, memory)
    close(torch.cat(posts, dim=1), vectors["decode.post_quant"], LIMIT)
    close(torch.cat(frames, dim=1), vectors["decode.video"], LIMIT)
    counts = GOLDEN.json("cases.json")["vae"][kind]["frames_per_chunk"]
    assert [part.shape[1] for part in frames] == counts[: len(frames)]


@pytest.mark.parametrize("kind", KINDS)
def test_larger_chunks_give_the_same_frames(kind: str) -> None:
    vectors, decoder = GOLDEN.tensors(kind), GOLDEN.decoder(GOLDEN.of_kind(expands=KINDS[kind], part="vae"))
    latents = vectors["decode.in.latents"]
    first, memory = decoder.chunk(latents[:, :1], torch.empty(0))
    rest, _ = decoder.chunk(latents[:, 1:], memory)
    close(torch.cat([first, rest], dim=1), vectors["decode.video"], LIMIT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_holds_what_the_reference_keeps(kind: str) -> None:
    decoder = GOLDEN.decoder(GOLDEN.of_kind(expands=KINDS[kind], part="vae"))
    latents = GOLDEN.tensors(kind)["decode.in.latents"]
    kept = Memory(torch.empty(0))
    decoder.decoder(decoder.post_quant_conv.windowed(decoder.denormalised(latents)[None, :, :1]), kept)
    shapes = [shape for shape in GOLDEN.json("cases.json")["vae"][kind]["cache_shapes_after_chunk1"] if shape != "None"]
    assert [list(part.shape[1:]) for part in kept.parts] == shapes


def _compare(vectors: dict[str, Tensor], prefix: str, seen: dict[str, Tensor]) -> None:
    for name, value in seen.items():
        if (expected := vectors.get(f"{prefix}.{name}")) is not None:
            close(value[0], expected, LIMIT)


def _check_memory(vectors: dict[str, Tensor], memory: Tensor) -> None:
    """The first parts are those of conv_in and of the first convolution of the middle block."""
    start = 0
    for number in (0, 1):
        expected = vectors[f"decode.cache_after_chunk1.{number}"]
        close(memory[start : start + expected.numel()].view(expected.shape), expected, LIMIT)
        start += expected.numel()
