"""Train `wan22:mini`: an autoencoder of short videos, then a text encoder and a transformer on its latents.

    python train_moves.py FOLDER [--vae-s 260] [--flow-s 540] [--start FOLDER]

With --start it continues from the weights of an earlier run.
Writes a checkpoint in the official layout, with the weights as bfloat16, and `train.json` with the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mstar_core.parallel.shards import WHOLE
from mstar_wan22 import moves
from mstar_wan22.checkpoint.config import (
    HIGH,
    INDEX,
    TEXT,
    VAE,
    Sizes,
    TextSizes,
    TransformerSizes,
    VaeSizes,
    read_sizes,
)
from mstar_wan22.checkpoint.weights import load
from mstar_wan22.nodes import transformer
from mstar_wan22.nodes.media import levels
from mstar_wan22.nodes.text import TextEncoder
from mstar_wan22.nodes.transformer import Transformer
from mstar_wan22.nodes.vae import Decoder, Encoder, chunk_bounds
from mstar_wan22.processor import NEGATIVE
from mstar_wan22.request.tokenizer import PromptTokenizer
from mstar_wan22.request.usual import KEY
from mstar_wan22.sources.layout import write_configs, write_weights

SEED: Final = 22
SPLIT_SEED: Final = 22
CHANNELS: Final = 8
SIZES: Final = Sizes(
    text=TextSizes(width=48, head_dim=16, inner=96, layers=1, heads=3, vocab=128),
    transformer=TransformerSizes(
        heads=4, head_dim=24, layers=4, inner=192, inputs=CHANNELS, outputs=CHANNELS, text=48, frequencies=64
    ),
    vae=VaeSizes(
        base=16,
        decoder_base=16,
        channels=CHANNELS,
        multipliers=(1, 1),
        blocks=1,
        temporal=(True,),
        mean=(0.0,) * CHANNELS,
        std=(1.0,) * CHANNELS,
    ),
    flow_shift=3.0,
)
DROPPED: Final = 0.12
"""Share of texts that are replaced by a negative prompt, for guidance."""

WITH_IMAGE: Final = 0.3
"""Share of videos whose first frame is given."""

VAE_VIDEOS: Final = 8
FLOW_VIDEOS: Final = 32
"""Videos of a step."""

BLUR: Final = 0.1
"""Noise on the latents that the decoder learns from: about a fifth of their deviation."""

SHARPNESS: Final = 2.0
"""First scale of queries to the text. Its few words have to outweigh 500 empty rows."""

DEFAULTS: Final = {"width": moves.SIDE, "height": moves.SIDE, "seconds": 0.34, "steps": 12, "scales": [2.0, 2.0]}
"""Values of requests that name none."""

BACKDROP: Final = moves.BACKGROUND[0] / 127.5 - 1
ROWS: Final = 20
"""Rows of a text in training. The last one stands for all that follow, see `short_texts`."""


def short_texts() -> None:
    """Let cross-attention see ROWS rows that weigh as much as TEXT_ROWS: rows behind a text are equal."""
    rest = math.log(transformer.TEXT_ROWS - ROWS + 1)
    transformer.TEXT_ROWS = ROWS  # type: ignore[misc]  # for this process
    full = transformer.attend
    bias = pad(torch.tensor([rest]), (ROWS - 1, 0))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] != ROWS:
            return full(q, k, v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(q.shape[2], ROWS)).transpose(1, 2)

    transformer.attend = attend


class Clock:
    """Learning rate of a stage that lasts a number of seconds of the processor: a short warm-up, then a cosine to 0."""

    def __init__(self, seconds: float, rate: float) -> None:
        self._start, self._seconds, self._rate = time.process_time(), seconds, rate
        self.steps = 0

    def rate(self) -> float | None:
        """Return the rate of the next step, None after the end."""
        if time.process_time() - self._start >= self._seconds:
            return None
        done = (time.process_time() - self._start) / self._seconds
        self.steps += 1
        return self._rate * min(1.0, self.steps / 50) * 0.5 * (1 + float(np.cos(np.pi * done)))


def initialise(module: torch.nn.Module) -> None:
    """Fill parameters that have no initial values of their own."""
    for name, value in module.named_parameters():
        if name.endswith("gamma") or ("norm" in name and name.endswith("weight")):
            torch.nn.init.ones_(value)
        elif name.endswith("scale_shift_table"):
            torch.nn.init.normal_(value, std=value.shape[-1] ** -0.5)
    for name, value in module.named_parameters():
        if name.startswith("proj_out"):
            torch.nn.init.zeros_(value)


def step(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float, parameters: list[Tensor]) -> None:
    """Make one step of an optimizer at a rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def videos(chosen: list[moves.Move], chance: random.Random) -> Tensor:
    """Return a video of each move, float32 [B, 3, F, side, side] in -1..1."""
    return levels(torch.stack([torch.from_numpy(moves.film(move, chance)) for move in chosen]), torch.float32).permute(
        0, 4, 1, 2, 3
    )


def encoded(encoder: Encoder, batch: Tensor) -> Tensor:
    """Return the means of a batch of videos, [B, channels, T, h, w]."""
    from mstar_wan22.nodes.vae import fold
    from mstar_wan22.nodes.vae_parts import Memory

    flat, chunks = batch.new_empty(0), []
    for start, stop in chunk_bounds(batch.shape[2], encoder.sizes.frames):
        memory = Memory(flat)
        out = encoder.encoder(fold(batch[:, :, start:stop], encoder.sizes.fold), memory)
        chunks.append(encoder.quant_conv.windowed(out))
        flat = memory.flat()
    return torch.cat(chunks, dim=2)[:, : encoder.sizes.channels]


def decoded(decoder: Decoder, latents: Tensor) -> Tensor:
    """Return a batch of videos of means."""
    from mstar_wan22.nodes.vae import unfold
    from mstar_wan22.nodes.vae_parts import Memory

    flat, chunks = latents.new_empty(0), []
    for number in range(latents.shape[2]):
        memory = Memory(flat)
        z = decoder.post_quant_conv.windowed(latents[:, :, number : number + 1])
        chunks.append(unfold(decoder.decoder(z, memory), decoder.sizes.fold))
        flat = memory.flat()
    return torch.cat(chunks, dim=2)


def continued(module: torch.nn.Module, node: str, start: Path | None) -> None:
    """Begin with the weights of an earlier run, if there is one."""
    if start is not None:
        with torch.no_grad():
            load(module, node, start, None)


def train_vae(seconds: float, train: list[moves.Move], start: Path | None) -> tuple[Encoder, Decoder, dict[str, Any]]:
    """Train the autoencoder with a little noise on its latents."""
    chance = random.Random(SEED)
    encoder, decoder = Encoder(SIZES.vae), Decoder(SIZES.vae)
    initialise(encoder)
    initialise(decoder)
    continued(encoder, "vae_encoder", start)
    continued(decoder, "vae_decoder", start)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0, weight_decay=1e-3, betas=(0.9, 0.98))
    clock, loss = Clock(seconds, 3e-3), torch.zeros(())
    while (rate := clock.rate()) is not None:
        batch = videos(chance.choices(train, k=VAE_VIDEOS), chance)
        mean = encoded(encoder, batch)
        shown = decoded(decoder, mean + BLUR * torch.randn_like(mean))
        weight = 1 + 4 * ((batch - BACKDROP).abs().amax(1, keepdim=True) > 0.1)
        loss = (weight * (shown - batch).square()).mean() + 1e-3 * mean.square().mean()
        step(optimizer, loss, rate, parameters)
        if clock.steps % 100 == 0:
            print(f"autoencoder step {clock.steps}: loss {loss.item():.5f}", flush=True)
    return encoder, decoder, {"steps": clock.steps, "loss": round(loss.item(), 6)}


@torch.no_grad()
def normalisation(encoder: Encoder, train: list[moves.Move]) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each latent channel."""
    chance = random.Random(SEED + 1)
    values = torch.cat([encoded(encoder, videos(chance.choices(train, k=16), chance)) for _ in range(16)])
    return values.mean((0, 2, 3, 4)), values.std((0, 2, 3, 4))


def train_flow(
    seconds: float,
    train: list[moves.Move],
    encoder: Encoder,
    scale: tuple[Tensor, Tensor],
    tokenizer: PromptTokenizer,
    start: Path | None,
) -> tuple[TextEncoder, Transformer, dict[str, Any]]:
    """Train text encoder and transformer: texts and, for some videos, the first frame."""
    chance = random.Random(SEED + 2)
    text, network = TextEncoder(SIZES.text), Transformer(SIZES.transformer, WHOLE)
    initialise(text)
    initialise(network)
    torch.nn.init.normal_(text.shared.weight)
    for block in network.blocks:
        torch.nn.init.constant_(block.attn2.norm_q.weight, SHARPNESS)
    continued(text, "text_encoder", start)
    continued(network, "transformer", start)
    parameters = [*text.parameters(), *network.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0, weight_decay=1e-3, betas=(0.9, 0.98))
    mean, std = (each.view(1, -1, 1, 1, 1) for each in scale)
    negatives = [torch.tensor(tokenizer.ids(words)) for words in ("", NEGATIVE)]
    ids = {move: torch.tensor(tokenizer.ids(move.sentence)) for move in train}
    pool = _pool(encoder, train, mean, std)
    averages = [value.detach().clone() for value in parameters]
    clock, smooth = Clock(seconds, 2e-3), 1.0
    while (rate := clock.rate()) is not None:
        chosen = chance.choices(pool, k=FLOW_VIDEOS)
        clean = torch.stack([latents for _, latents in chosen])
        noise = torch.randn_like(clean)
        share = torch.rand(len(clean))
        sigma = SIZES.flow_shift * share / (1 + (SIZES.flow_shift - 1) * share)
        x = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1))
        times = (1000 * sigma)[:, None].repeat(1, 2)
        given = torch.rand(len(clean)) < WITH_IMAGE
        x[given, :, :1] = clean[given, :, :1]
        times[given, 0] = 0
        prompts = [chance.choice(negatives) if chance.random() < DROPPED else ids[move] for move, _ in chosen]
        unique = {tuple(each.tolist()): each for each in prompts}
        vectors = {key: text.encoded(value)[-1] for key, value in unique.items()}
        frame = x[0, 0, 0].numel() // SIZES.transformer.patch**2
        spans = (frame, frame * (x.shape[2] - 1))
        found = network(x, times, spans, [vectors[tuple(each.tolist())] for each in prompts])
        error = (found - (noise - clean)).square()
        weight = torch.ones_like(error)
        weight[given, :, :1] = 0
        loss = (error * weight).sum() / weight.sum()
        step(optimizer, loss, rate, parameters)
        with torch.no_grad():
            share = min(0.1, 0.005 + 1 / (clock.steps + 1))
            torch._foreach_lerp_(averages, [value.detach() for value in parameters], share)
        smooth = 0.98 * smooth + 0.02 * loss.item()
        if clock.steps % 100 == 0:
            print(f"flow step {clock.steps}: loss {smooth:.4f}", flush=True)
    with torch.no_grad():
        for value, average in zip(parameters, averages, strict=True):
            value.copy_(average)
    return text, network, {"steps": clock.steps, "loss": round(smooth, 5)}


@torch.no_grad()
def _pool(encoder: Encoder, train: list[moves.Move], mean: Tensor, std: Tensor) -> list[tuple[moves.Move, Tensor]]:
    """Return normalised latents of many videos, encoded once."""
    chance, pool = random.Random(SEED + 3), []
    for _ in range(48):
        chosen = chance.choices(train, k=32)
        latents = (encoded(encoder, videos(chosen, chance)) - mean) / std
        pool += list(zip(chosen, latents, strict=True))
    return pool


def train(folder: Path, seconds: tuple[float, float], start: Path | None = None) -> dict[str, Any]:
    """Train all stages and write the checkpoint. Returns the figures."""
    vae_s, flow_s = seconds
    torch.manual_seed(SEED)
    short_texts()
    seen, _ = moves.split(SPLIT_SEED)
    write_configs(folder, SIZES, moves.words())
    encoder, decoder, first = train_vae(vae_s, seen, start)
    if start is not None and not vae_s:
        known = read_sizes(start).vae
        mean, std = torch.tensor(known.mean), torch.tensor(known.std)
    else:
        mean, std = normalisation(encoder, seen)
    rounded = [tuple(round(value, 5) for value in each.tolist()) for each in (mean, std)]
    sizes = replace(SIZES, vae=replace(SIZES.vae, mean=rounded[0], std=rounded[1]))
    write_configs(folder, sizes, moves.words())
    text, network, second = train_flow(flow_s, seen, encoder, (mean, std), PromptTokenizer(folder), start)
    tensors = {TEXT: text.state_dict(), HIGH: network.state_dict(), VAE: encoder.state_dict() | decoder.state_dict()}
    write_weights(
        folder, {part: {name: _stored(value) for name, value in each.items()} for part, each in tensors.items()}
    )
    count = sum(value.numel() for each in tensors.values() for value in each.values())
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    (folder / INDEX).write_text(json.dumps({**index, KEY: DEFAULTS}) + "\n", encoding="utf-8")
    log = {"parameters": count, "autoencoder": first, "flow": second, "seconds": list(seconds)}
    (folder / "train.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    return log


def _stored(value: Tensor) -> Tensor:
    return value.detach().to(torch.bfloat16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae-s", type=float, default=260)
    parser.add_argument("--flow-s", type=float, default=540)
    parser.add_argument("--start", type=Path)
    given = parser.parse_args()
    print(train(given.folder, (given.vae_s, given.flow_s), given.start))
