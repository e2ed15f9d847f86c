"""The encoder on CUDA: captured batches equal uncaptured ones and those of the CPU; a memory is made for all layers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device
from mstar_core.layers import BlockSpec, Checkpoint, EncoderBlock, load_weights
from mstar_whisper.checkpoint.config import read_config
from mstar_whisper.checkpoint.shipped import FOLDER
from mstar_whisper.model import DECODER, ENCODER, name_map
from mstar_whisper.nodes.decoder import SpeechDecoder
from mstar_whisper.nodes.encoder import WINDOWS, Encoder
from mstar_whisper.nodes.rules import Rules

pytestmark = pytest.mark.gpu

CONFIG = read_config(FOLDER)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    device = torch.device("cuda", 0)
    prepare_device(device)
    return device


def loaded(kind: type[Encoder | SpeechDecoder], device: torch.device, dtype: torch.dtype) -> Any:
    prefix, into = (ENCODER, "") if kind is Encoder else (DECODER, "decoder.")
    module, files = kind(CONFIG), Checkpoint.find(FOLDER)
    load_weights(module, files, name_map(files.file_of, prefix, into), None)
    return module.to(device, dtype).eval().requires_grad_(False)


def spectra(count: int) -> list[Tensor]:
    """Return random spectra, half of them shorter than a window."""
    chance = torch.Generator().manual_seed(count)
    lengths = [CONFIG.frames // (1 + index % 2) for index in range(count)]
    return [torch.randn(length, CONFIG.bins, generator=chance) for length in lengths]


@torch.inference_mode()
def test_captured_windows_equal_uncaptured_ones(cuda: torch.device) -> None:
    encoder = loaded(Encoder, cuda, torch.bfloat16)
    encoder.join()
    plain = {}
    for count in (1, 3, 5, max(WINDOWS)):
        mel, place = [one.to(cuda) for one in spectra(count)], torch.tensor([[0, CONFIG.frames]] * count).numpy()
        plain[count] = encoder(mel=mel, place=place)["states"]
    encoder.capture(GraphCache(cuda, name="encoder"))
    for count, wanted in plain.items():
        mel, place = [one.to(cuda) for one in spectra(count)], torch.tensor([[0, CONFIG.frames]] * count).numpy()
        for _ in range(2):
            found = encoder(mel=mel, place=place)["states"]
            while encoder.idle():
                pass
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert encoder.graph_counts.hits >= len(plain) - 1


@torch.inference_mode()
def test_states_are_those_of_the_cpu(cuda: torch.device) -> None:
    mel, place = spectra(2), torch.tensor([[0, CONFIG.frames]] * 2).numpy()
    wanted = loaded(Encoder, torch.device("cpu"), torch.float32)(mel=mel, place=place)["states"]
    found = loaded(Encoder, cuda, torch.float32)(mel=[one.to(cuda) for one in mel], place=place)["states"]
    torch.testing.assert_close(found.cpu(), wanted, atol=2e-2, rtol=1e-2)


class Kept:
    """Keys and values of each layer, as a memory takes them."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.layers[layer] = (key, value)


@torch.inference_mode()
def test_joined_projections_make_the_memory_of_each_layer(cuda: torch.device) -> None:
    decoder, states = loaded(SpeechDecoder, cuda, torch.float32), torch.randn(7, CONFIG.width, device=cuda)
    apart, joined = Kept(), Kept()
    decoder.decoder.remember(states, apart)
    decoder.join()
    decoder.decoder.remember(states, joined)
    for layer, pair in apart.layers.items():
        torch.testing.assert_close(joined.layers[layer], pair, atol=1e-3, rtol=1e-3)


def marks(count: int, seed: int) -> Tensor:
    """Return marks of sequences in all states: in a head, at the first id, behind texts, timestamps and pairs."""
    chance, ids = random.Random(seed), CONFIG.ids
    rows = []
    for _ in range(count):
        written = chance.choice([-3, -2, -1, 0, 1, 2, 9])
        kinds = range(ids.end), range(ids.first_time, CONFIG.vocab)
        pair = [chance.choice(chance.choice(kinds)) if written > place else 0 for place in range(2)]
        time = max([number for number in pair if number >= ids.first_time], default=0)
        form = chance.choice([-1, 0, 1, 1])
        rows.append([written, *pair, time, form, ids.start, ids.no_times, ids.end])
    return torch.tensor(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_kernels_of_the_rules_equal_plain_operations(cuda: torch.device, dtype: torch.dtype) -> None:
    rules, chance = Rules(CONFIG.ids, CONFIG.vocab), torch.Generator().manual_seed(1)
    for seed in range(20):
        states = marks(16, seed)
        logits = (2 * torch.randn(16, CONFIG.vocab, generator=chance)).to(dtype)
        logits[:, CONFIG.ids.first_time :] += 2.0 - seed % 4
        wanted = rules.constrained_plainly(logits, states)
        found = rules.constrained(logits.to(cuda), states.to(cuda))
        assert torch.equal(found.float().cpu(), wanted)
        token = torch.randint(CONFIG.vocab, (16,), generator=chance)
        assert torch.equal(rules.after(states.to(cuda), token.to(cuda)).cpu(), rules.after(states, token))


@torch.inference_mode()
def test_blocks_in_half_precision_are_near_those_in_float32(cuda: torch.device) -> None:
    spec = BlockSpec(width=256, heads=4, inner=512, key_bias=False)
    torch.manual_seed(1)
    block, x = EncoderBlock(spec).to(cuda), torch.randn(3, 50, 256, device=cuda)
    wanted = block(x)
    torch.testing.assert_close(block.bfloat16()(x.bfloat16()).float(), wanted, atol=6e-2, rtol=3e-2)
