"""The nodes on CUDA: float32 against the CPU, captured against uncaptured, streams of mixed ages in one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device
from mstar_core.layers.linear import fuse_projections
from mstar_qwen3tts.codec.codec import Codec
from mstar_qwen3tts.model import new_module

from .golden_set import FOLDER, config_of, node, tensors

pytestmark = pytest.mark.gpu

QUIETER_DB = 50.0
"""Least distance of the sound from the error of a decoder in half precision."""


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    device = torch.device("cuda", 0)
    prepare_device(device)
    return device


def codec_on(device: torch.device) -> Codec:
    made = new_module("Codec", config_of("custom_voice"))
    made.load_state_dict(node("custom_voice", "Codec").state_dict())
    assert isinstance(made, Codec)
    return made.to(device).eval().requires_grad_(False)


def test_sound_equals_the_reference(cuda: torch.device) -> None:
    given, codec = tensors("codec"), codec_on(cuda)
    made = codec.run(given["in.codes"].long()[None].to(cuda), codec.new_state(1))[0]
    torch.testing.assert_close(made[0].cpu(), given["waveform_whole"].flatten(), atol=2e-4, rtol=0)


def test_sound_of_half_precision_is_far_above_its_error(cuda: torch.device) -> None:
    given, codec = tensors("codec"), codec_on(cuda)
    codec.has_half_decoder = True
    codes, state, pieces = given["in.codes"].long()[None].to(cuda), codec.new_state(1), []
    for piece in codes.split(3, dim=1):
        made, state = codec.run(piece, state)
        pieces.append(made[0].cpu())
    expected = given["waveform_whole"].flatten()
    error = (torch.cat(pieces) - expected).norm()
    assert 20 * torch.log10(expected.norm() / error) > QUIETER_DB


def test_fused_pieces_equal_those_of_the_cpu_with_their_states(cuda: torch.device) -> None:
    """The state of one goes on at the other, because both have one layout."""
    plain, fused = node("custom_voice", "Codec"), codec_on(cuda)
    codes = tensors("codec")["in.codes"].long()[None].repeat(2, 1, 1)
    codes[1] = codes[1].flip(0)
    state, at = plain.new_state(2), 0
    longer = codes.repeat(1, 3, 1)  # the last piece is longer than the window of attention
    for size in (1, 2, 4, 3, plain.sizes.window + 3):
        piece = longer[:, at : at + size]
        expected, after = plain.run(piece, state)
        found, left = fused.run(piece.to(cuda), state.to(cuda))
        torch.testing.assert_close(found.cpu(), expected, atol=2e-4, rtol=0)
        torch.testing.assert_close(left.cpu(), after, atol=2e-4, rtol=1e-4)
        state, at = after, at + size


def test_captured_pieces_equal_uncaptured_ones(cuda: torch.device) -> None:
    codec, codes = codec_on(cuda), tensors("codec")["in.codes"].long().to(cuda)
    plain = codec(codes=torch.stack([codes[:4], codes[4:8]]), state=torch.stack([*codec.new_state(2)]))
    codec.capture(GraphCache(cuda, name="Codec"))
    for _ in range(3):
        found = codec(codes=torch.stack([codes[:4], codes[4:8]]), state=[*codec.new_state(2)])
        while codec.idle():
            pass
    assert (found["pcm"].int() - plain["pcm"].int()).abs().max() <= 2
    for one, other in zip(found["state"], plain["state"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("folder", ["custom_voice", "base"])
def test_the_predictor_in_half_precision_draws_codes(cuda: torch.device, folder: str) -> None:
    assert FOLDER.is_dir()
    talker: Any = new_module("Talker", config_of(folder))
    talker.load_state_dict(node(folder, "Talker").state_dict())
    predictor = talker.code_predictor
    rotation = predictor.model.rotation
    talker = talker.to(cuda, torch.bfloat16).eval().requires_grad_(False)
    predictor.model.rotation = rotation.to(cuda)
    fuse_projections(talker)
    width = config_of(folder).talker.width
    rule = (torch.ones(3, device=cuda), torch.full((3,), 5, device=cuda), torch.ones(3, device=cuda))
    hidden = torch.randn(3, width, device=cuda, dtype=torch.bfloat16)
    frames = talker.predict(hidden, torch.arange(3, device=cuda), torch.rand(3, talker.groups - 1, device=cuda), *rule)
    assert frames.shape == (3, talker.groups) and 0 <= int(frames.min()) <= int(frames.max()) < 64
