"""Recordings in the reference: a clip to the speaker's vector, and to frames of codes (specification section 14)."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import conv1d, elu, pad

from mstar_qwen3tts.reference_layers import Sizes, Weights, codebook, transformer

WINDOW, HOP, NYQUIST = 1024, 256, 12_000
DILATIONS: Final = (1, 2, 3, 4, 1)

# -- speaker ---------------------------------------------------------------------------------------------------------


def speaker_vector(w: Weights, sizes: Sizes, clip: Tensor) -> Tensor:
    """Return the vector [width] of a clip [n] at 24 kHz, by ECAPA-TDNN."""
    dilations = sizes.get("enc_dilations", DILATIONS)
    x, made = tdnn(w, "blocks.0", log_mel(clip, w["speaker_encoder.blocks.0.conv.weight"].shape[1])), list[Tensor]()
    for block in range(1, len(dilations) - 1):
        own = f"blocks.{block}"
        inner = res2net(w, f"{own}.res2net_block.blocks", tdnn(w, f"{own}.tdnn1", x), dilations[block])
        inner = tdnn(w, f"{own}.tdnn2", inner)
        squeezed = conv(w, f"{own}.se_block.conv1", inner.mean(1, keepdim=True)).relu()
        x = x + inner * conv(w, f"{own}.se_block.conv2", squeezed).sigmoid()
        made.append(x)
    x = tdnn(w, "mfa", torch.cat(made))
    mean, deviation = (each.expand_as(x) for each in moments(x, torch.ones(()) / x.shape[1]))
    weights = conv(w, "asp.conv", tdnn(w, "asp.tdnn", torch.cat([x, mean, deviation])).tanh()).softmax(1)
    return conv(w, "fc", torch.cat(moments(x, weights)))[:, 0]


def conv(w: Weights, at: str, x: Tensor, dilation: int = 1) -> Tensor:
    """Convolution that keeps the length, with mirrored edges. x: [channels, T]."""
    weight = w[f"speaker_encoder.{at}.weight"]
    edge = dilation * (weight.shape[2] - 1) // 2
    x = pad(x[None], (edge, edge), mode="reflect")[0] if edge else x
    return conv1d(x, weight, w[f"speaker_encoder.{at}.bias"], dilation=dilation)


def tdnn(w: Weights, at: str, x: Tensor, dilation: int = 1) -> Tensor:
    """Convolution and ReLU."""
    return conv(w, f"{at}.conv", x, dilation).relu()


def res2net(w: Weights, at: str, x: Tensor, dilation: int) -> Tensor:
    """Convolutions of slices of the channels; from the third slice on each also reads the result before."""
    width = w[f"speaker_encoder.{at}.0.conv.weight"].shape[1]
    made: list[Tensor] = []
    for index, part in enumerate(x.split(width)):
        part = part + made[-1] if index > 1 else part
        made.append(tdnn(w, f"{at}.{index - 1}", part, dilation) if index else part)
    return torch.cat(made)


def moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation over time, each [channels, 1]."""
    mean = (weights * x).sum(1, keepdim=True)
    return mean, (weights * (x - mean) ** 2).sum(1, keepdim=True).clamp(min=1e-12).sqrt()


def log_mel(clip: Tensor, bins: int) -> Tensor:
    """Return the log-mel spectrogram [bins, T]: frames of a Hann window, their spectrum, Slaney's triangles."""
    edge = (WINDOW - HOP) // 2
    pieces = pad(clip[None], (edge, edge), mode="reflect")[0].unfold(0, WINDOW, HOP)
    hann = 0.5 - 0.5 * (2 * math.pi * torch.arange(WINDOW) / WINDOW).cos()
    magnitude = (torch.fft.rfft(pieces * hann).abs().square() + 1e-9).sqrt()
    bands: Tensor = triangles(bins) @ magnitude.T
    return bands.clamp(min=1e-5).log()


def triangles(bins: int) -> Tensor:
    """Return the weights of spectral lines in each band, [bins, lines]: corners are linear to 1 kHz, then geometric."""
    step = math.log(6.4) / 27
    points = torch.linspace(0, 15 + math.log(NYQUIST / 1000) / step, bins + 2, dtype=torch.float64)
    corners = torch.where(points < 15, points * 200 / 3, 1000 * (step * (points - 15)).exp())
    low, middle, high = (corners[at : at + bins, None] for at in range(3))
    lines = torch.linspace(0, NYQUIST, WINDOW // 2 + 1, dtype=torch.float64)
    shape = torch.minimum((lines - low) / (middle - low), (high - lines) / (high - middle)).clamp(min=0)
    return (shape * 2 / (high - low)).float()


# -- codes -----------------------------------------------------------------------------------------------------------


def codes_of(w: Weights, codec: Sizes, clip: Tensor) -> Tensor:
    """Return the frames of a clip [n] at 24 kHz: int64 [frames, groups]. codec: the codec's config.json."""
    sizes = codec["encoder_config"]
    x, at = strided(w, "encoder.encoder.layers.0.conv", clip[None], 1), 0
    for rate in reversed(sizes["upsampling_ratios"]):
        block = f"encoder.encoder.layers.{at + 1}.block"
        inner = strided(w, f"{block}.1.conv", elu(x), 1)
        x = x + strided(w, f"{block}.3.conv", elu(inner), 1)
        at += 3
        x = strided(w, f"encoder.encoder.layers.{at}.conv", elu(x), rate)
    x = strided(w, f"encoder.encoder.layers.{at + 2}.conv", elu(x), 1)
    x = transformer(w, "encoder.encoder_transformer", x.T, sizes).T
    x = strided(w, "encoder.downsample.conv", x, 2, mode="replicate")
    levels = codec["encoder_valid_num_quantizers"] - 1
    return torch.stack([*nearest(w, "semantic", x, 1), *nearest(w, "acoustic", x, levels)], dim=1)


def strided(w: Weights, at: str, x: Tensor, stride: int, mode: str = "constant") -> Tensor:
    """Causal convolution to ceil(T / stride) positions. x: [channels, T]."""
    weight = w[f"{at}.weight"]
    x = pad(x[None], (weight.shape[2] - stride, -x.shape[1] % stride), mode=mode)[0]
    return conv1d(x, weight, w.get(f"{at}.bias"), stride)


def nearest(w: Weights, kind: str, x: Tensor, levels: int) -> list[Tensor]:
    """Return the codes of residual quantization, [T] per level: each level quantizes what the one before left."""
    own, codes = f"encoder.quantizer.{kind}_residual_vector_quantizer", list[Tensor]()
    rest = conv1d(x, w[f"{own}.input_proj.weight"]).T
    for level in range(levels):
        vectors = codebook(w, f"{own}.layers.{level}.codebook", "embed_sum")
        codes.append((rest[:, None] - vectors).square().sum(-1).argmin(1))
        rest = rest - vectors[codes[-1]]
    return codes
