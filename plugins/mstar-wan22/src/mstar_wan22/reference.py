"""The same video by plain tensor operations, for the gold checks. A development tool: no process serves with it.

The mathematics of Wan 2.2 in one file: UMT5 encoder, transformer, UniPC on the grid of diffusers, and both
autoencoders, in float32. It shares the sizes and defaults of a checkpoint with the model, and no computation. Nothing
is batched, cached or decoded in chunks: a video is one tensor [channels, frames, rows, columns] from noise to pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv3d, gelu, layer_norm, linear, pad, silu

from mstar_core.plugin.check.reference import ReferenceRequest
from mstar_wan22.checkpoint.config import Sizes, TextSizes, TransformerSizes, VaeSizes, read_sizes
from mstar_wan22.request.usual import read_usual

Weights = Mapping[str, Tensor]
TEXT_ROWS = 512


def reference(folder: Path, request: ReferenceRequest) -> Mapping[str, npt.NDArray[Any]]:
    """Return {"frames": uint8 [F, y, x, 3]}. Previews are events and not compared."""
    sizes, params, arrays = read_sizes(folder), request.params, request.arrays
    usual, grid = read_usual(folder, sizes), arrays["grid"].shape
    scales = usual.scales if params.guidance_scale is None else (params.guidance_scale, params.guidance_scale)
    scales = scales if params.guidance_scale_2 is None else (scales[0], params.guidance_scale_2)
    levels, times = noise_levels(params.num_inference_steps or usual.steps, params.flow_shift or usual.shift)
    names = ("transformer", "transformer_2") if sizes.has_experts else ("transformer",)
    experts, vae, umt5 = [_read(folder / name) for name in names], _read(folder / "vae"), _read(folder / "text_encoder")
    with torch.inference_mode():
        prompts = ("tokens", "negative_tokens") if scales[0] > 1 else ("tokens",)
        texts = [text_vectors(umt5, sizes.text, torch.from_numpy(arrays[name])) for name in prompts]
        ends = [torch.from_numpy(arrays[name]) / 127.5 - 1 for name in ("image", "last_image") if name in arrays]
        condition = _condition(vae, sizes, ends, grid[0]) if ends else None

        def velocity(x: Tensor, step: int) -> Tensor:
            expert = int(sizes.boundary is not None and times[step] < 1000 * sizes.boundary)
            time = torch.full((grid[0],), times[step])
            if condition is not None and sizes.expands:  # the image is the first frame, without noise
                x, time[0] = torch.cat([condition, x[:, 1:]], dim=1), 0
            elif condition is not None:
                x = torch.cat([x, condition])
            branches = [transformer(experts[expert], sizes.transformer, x, time, text) for text in texts]
            return branches[-1] + scales[expert] * (branches[0] - branches[-1])

        noise = torch.randn((1, sizes.vae.channels, *grid), generator=torch.Generator().manual_seed(request.seed))
        x = solved(noise[0], levels, velocity)
        if condition is not None and sizes.expands:
            x = torch.cat([condition, x[:, 1:]], dim=1)
        pixels = (decoded(vae, sizes.vae, x) / 2 + 0.5).clamp(0, 1) * 255
    return {"frames": pixels.to(torch.uint8).permute(1, 2, 3, 0).numpy()}


def _condition(vae: Weights, sizes: Sizes, ends: Sequence[Tensor], frames: int) -> Tensor:
    """Return the latents of the first frame (TI2V), or a mask and the latents of a grey video with given ends (I2V)."""
    if sizes.expands:
        return encoded(vae, sizes.vae, ends[0][:, None])
    video, given = torch.zeros(3, 4 * frames - 3, *ends[0].shape[1:]), torch.zeros(4 * frames - 3)
    for place, image in zip((0, -1), ends, strict=False):
        video[:, place], given[place] = image, 1
    latents = encoded(vae, sizes.vae, video)
    mask = torch.cat([given[:1].repeat(3), given]).view(frames, 4).T  # the first frame counts four times
    return torch.cat([mask[:, :, None, None].expand(-1, -1, *latents.shape[2:]), latents])


def text_vectors(w: Weights, sizes: TextSizes, ids: Tensor) -> Tensor:
    """Return UMT5's vector of each id, then zeros, which the transformer reads too: [TEXT_ROWS, width]."""
    x, places = w["shared.weight"][ids], torch.arange(len(ids))
    buckets = torch.tensor([[_bucket(int(key - query), sizes) for key in places] for query in places])
    for block in _parts(w, "encoder.block"):
        attention, mlp = _parts(block, "layer")
        y = _rms(x, sizes.eps) * attention["layer_norm.weight"]
        q, k, v = (_heads(_linear(attention, f"SelfAttention.{name}", y), sizes.heads) for name in "qkv")
        scores = q @ k.mT + attention["SelfAttention.relative_attention_bias.weight"][buckets].movedim(2, 0)
        x = x + _linear(attention, "SelfAttention.o", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        y = _rms(x, sizes.eps) * mlp["layer_norm.weight"]
        gate = gelu(_linear(mlp, "DenseReluDense.wi_0", y), approximate="tanh")
        x = x + _linear(mlp, "DenseReluDense.wo", gate * _linear(mlp, "DenseReluDense.wi_1", y))
    return pad(_rms(x, sizes.eps) * w["encoder.final_layer_norm.weight"], (0, 0, 0, TEXT_ROWS - len(x)))


def _bucket(distance: int, sizes: TextSizes) -> int:
    """Return the row of a distance in a block's table: one for each short distance, then logarithmic."""
    half, exact, far = sizes.buckets // 2, sizes.buckets // 4, abs(distance)
    if far >= exact:
        share = math.log(far / exact) / math.log(sizes.max_distance / exact)
        far = min(half - 1, exact + int(share * (half - exact)))
    return far + (half if distance > 0 else 0)


def transformer(w: Weights, sizes: TransformerSizes, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
    """Return the velocity, noise minus data: [outputs, T, h, w]. x: [inputs, T, h, w]. times: of each frame [T].

    A token is 2 x 2 latents of a frame. It attends to all tokens and to all rows of the text.
    """
    frames, rows, columns = x.shape[1], x.shape[2] // 2, x.shape[3] // 2
    patches = x.reshape(-1, frames, rows, 2, columns, 2).permute(1, 2, 4, 0, 3, 5).reshape(frames * rows * columns, -1)
    x = patches @ w["patch_embedding.weight"].flatten(1).T + w["patch_embedding.bias"]
    angles = times[:, None] * 10000 ** -(torch.arange(0, sizes.frequencies, 2) / sizes.frequencies)
    embed = _part(w, "condition_embedder")
    time = _linear(embed, "time_embedder.linear_1", torch.cat([angles.cos(), angles.sin()], dim=1))
    time = _linear(embed, "time_embedder.linear_2", silu(time)).repeat_interleave(rows * columns, dim=0)
    modulation = _linear(embed, "time_proj", silu(time)).unflatten(1, (6, -1))
    text = gelu(_linear(embed, "text_embedder.linear_1", text), approximate="tanh")
    text = _linear(embed, "text_embedder.linear_2", text)
    turns = _turns((frames, rows, columns), sizes.head_dim)
    for block in _parts(w, "blocks"):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (block["scale_shift_table"] + modulation).unbind(1)
        y = layer_norm(x, x.shape[-1:], eps=sizes.eps) * (1 + scale_1) + shift_1
        x = x + gate_1 * _attention(_part(block, "attn1"), sizes, y, y, turns)
        y = layer_norm(x, x.shape[-1:], eps=sizes.eps) * block["norm2.weight"] + block["norm2.bias"]
        x = x + _attention(_part(block, "attn2"), sizes, y, text, None)
        y = layer_norm(x, x.shape[-1:], eps=sizes.eps) * (1 + scale_2) + shift_2
        inner = gelu(_linear(block, "ffn.net.0.proj", y), approximate="tanh")
        x = x + gate_2 * _linear(block, "ffn.net.2", inner)
    shift, scale = (w["scale_shift_table"] + time[:, None]).unbind(1)
    y = layer_norm(x, x.shape[-1:], eps=sizes.eps) * (1 + scale) + shift
    out = _linear(w, "proj_out", y).view(frames, rows, columns, 2, 2, -1).permute(5, 0, 1, 3, 2, 4)
    return out.reshape(-1, frames, 2 * rows, 2 * columns)


def _attention(w: Weights, sizes: TransformerSizes, x: Tensor, read: Tensor, turns: Tensor | None) -> Tensor:
    """Attend from x to `read`. Queries and keys are normed over all heads together. turns: of their positions."""
    q = _heads(_rms(_linear(w, "to_q", x), sizes.eps) * w["norm_q.weight"], sizes.heads)
    k = _heads(_rms(_linear(w, "to_k", read), sizes.eps) * w["norm_k.weight"], sizes.heads)
    v = _heads(_linear(w, "to_v", read), sizes.heads)
    if turns is not None:
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns).flatten(-2) for y in (q, k))
    seen = (q @ k.mT / math.sqrt(sizes.head_dim)).softmax(-1) @ v
    return _linear(w, "to_out.0", seen.transpose(0, 1).flatten(1))


def _turns(grid: Sequence[int], head_dim: int) -> Tensor:
    """Return the rotations of a head's pairs of values, complex [N, head_dim / 2], by frame, row and column."""
    side = head_dim // 6 * 2
    places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float64) for count in grid)).view(-1, 3)
    speeds = [10000 ** (-torch.arange(0, m, 2, dtype=torch.float64) / m) for m in (head_dim - 2 * side, side, side)]
    angles = torch.cat([places[:, axis, None] * speeds[axis] for axis in range(3)], dim=1)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def noise_levels(steps: int, shift: float) -> tuple[list[float], list[int]]:
    """Return the noise level of each step and 0 behind them, rounded to float32, and the timestep of each step."""
    levels = [shift * u / (1 + (shift - 1) * u) for u in (1 - 0.999 * step / steps for step in range(steps))]
    levels[0] -= 1e-6  # from 1, where the logarithm of the data's share is infinite
    return torch.tensor([*levels, 0.0], dtype=torch.float32).tolist(), [math.trunc(1000 * level) for level in levels]


def solved(x: Tensor, levels: Sequence[float], velocity: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the data by UniPC of order 2 (Zhao et al., 2023) with B2(h) = exp(h) - 1.

    A step corrects x, since the data at its place is now known, then goes on. The first and last one are of order 1.
    """
    ratio, known, last = [math.log(1 - level) - math.log(level) for level in levels[:-1]], list[Tensor](), x
    for i in range(len(ratio)):
        data = x - levels[i] * velocity(x, i)
        if i > 0:
            h = ratio[i] - ratio[i - 1]
            e, change = math.expm1(-h), (data - known[-1]) / 2
            if i > 1:
                r, k = (ratio[i - 2] - ratio[i - 1]) / h, -e / h - 1
                b_1, b_2 = k / e, 2 * (-k / h - 0.5) / e
                rho = (b_1 - b_2) / (1 - r)
                change = rho * (known[-2] - known[-1]) / r + (b_1 - rho) * (data - known[-1])
            x = last = levels[i] / levels[i - 1] * last - (1 - levels[i]) * e * (known[-1] + change)
        if i + 1 < len(ratio):
            h = ratio[i + 1] - ratio[i]
            slope = (known[-1] - data) / (ratio[i - 1] - ratio[i]) if i > 0 else 0 * data
            x = levels[i + 1] / levels[i] * x - (1 - levels[i + 1]) * math.expm1(-h) * (data + h / 2 * slope)
        known.append(data)
    return known[-1]


def encoded(w: Weights, sizes: VaeSizes, video: Tensor) -> Tensor:
    """Return normalised latents [z, T, h, w], the posterior's mean. video: [3, 4 T - 3, y, x] in -1..1."""
    cells = video.unflatten(3, (-1, sizes.fold)).unflatten(2, (-1, sizes.fold))  # colour, F, h, row, w, column
    net = _part(w, "encoder")
    x = _conv(net, "conv_in", cells.permute(0, 5, 3, 1, 2, 4).flatten(0, 2))
    for block in _parts(net, "down_blocks"):
        if sizes.is_residual:
            down, y = _part(block, "downsampler"), x
            for resnet in _parts(block, "resnets"):
                y = _resnet(resnet, y)
            means = _averaged(x, len(y), 2 if "time_conv.weight" in down else 1, 2 if down else 1)
            x = means + (_down(down, y) if down else y)
        else:
            x = _resnet(block, x) if "conv1.weight" in block else _down(block, x)
    x = _conv(net, "conv_out", silu(_norm(net, "norm_out", _middle(_part(net, "mid_block"), x))))
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (sizes.mean, sizes.std))
    return (_conv(w, "quant_conv", x)[: sizes.channels] - mean) / std


def decoded(w: Weights, sizes: VaeSizes, latents: Tensor) -> Tensor:
    """Return the video [3, 4 T - 3, y, x] in -1..1 of normalised latents [z, T, h, w]."""
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (sizes.mean, sizes.std))
    net = _part(w, "decoder")
    x = _conv(net, "conv_in", _conv(w, "post_quant_conv", latents * std + mean))
    x = _middle(_part(net, "mid_block"), x)
    for block in _parts(net, "up_blocks"):
        before, up = x, _part(block, "upsampler") or _part(block, "upsamplers.0")
        for resnet in _parts(block, "resnets"):
            x = _resnet(resnet, x)
        x = _up(up, x) if up else x
        if up and sizes.is_residual:
            x = x + _repeated(before, len(x), 2 if "time_conv.weight" in up else 1)
    x = _conv(net, "conv_out", silu(_norm(net, "norm_out", x)))
    cells = x.view(3, sizes.fold, sizes.fold, *x.shape[1:]).permute(0, 3, 4, 2, 5, 1)  # colour, F, h, row, w, column
    return cells.flatten(4, 5).flatten(2, 3).clamp(-1, 1)


def _resnet(w: Weights, x: Tensor) -> Tensor:
    y = _conv(w, "conv1", silu(_norm(w, "norm1", x)))
    y = _conv(w, "conv2", silu(_norm(w, "norm2", y)))
    return y + (_conv(w, "conv_shortcut", x) if "conv_shortcut.weight" in w else x)


def _middle(w: Weights, x: Tensor) -> Tensor:
    """Return two blocks with attention between them: over all pixels of a frame, with one head."""
    (first, second), attention = _parts(w, "resnets"), _part(w, "attentions.0")
    x = _resnet(first, x)
    qkv = _conv(attention, "to_qkv", _norm(attention, "norm", x))
    q, k, v = qkv.flatten(2).permute(1, 2, 0).chunk(3, dim=2)  # [F, pixels, C]
    seen = (q @ k.mT / math.sqrt(len(x))).softmax(-1) @ v
    return _resnet(second, x + _conv(attention, "proj", seen.permute(2, 0, 1).reshape(x.shape)))


def _down(w: Weights, x: Tensor) -> Tensor:
    """Halve rows and columns, and if the level resamples time, the frames behind the first one."""
    x = _conv(w, "resample.1", x, stride=(1, 2, 2))
    if "time_conv.weight" in w:
        x = torch.cat([x[:, :1], _conv(w, "time_conv", x, stride=(2, 1, 1))[:, 1:]], dim=1)
    return x


def _up(w: Weights, x: Tensor) -> Tensor:
    """Double what `_down` halves. The first frame counts as zero for the frames behind it."""
    if "time_conv.weight" in w:
        later = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], dim=1)
        pairs = _conv(w, "time_conv", later).unflatten(0, (2, -1)).permute(1, 2, 0, 3, 4)
        x = torch.cat([x[:, :1], pairs[:, 1:].flatten(1, 2)], dim=1)
    return _conv(w, "resample.1", x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))


def _averaged(x: Tensor, outputs: int, time: int, side: int) -> Tensor:
    """Return means over groups of channels and places. A first frame without a partner has a zero one before it."""
    x = pad(x, (0, 0, 0, 0, -x.shape[1] % time, 0))
    grid = x.shape[1] // time, x.shape[2] // side, x.shape[3] // side
    cells = x.view(len(x), grid[0], time, grid[1], side, grid[2], side).permute(0, 2, 4, 6, 1, 3, 5)
    return cells.reshape(outputs, -1, *grid).mean(1)


def _repeated(x: Tensor, outputs: int, time: int) -> Tensor:
    """Return channels as places. The first frame is the last one of its group."""
    cells = x.repeat_interleave(outputs * time * 4 // len(x), dim=0).view(outputs, time, 2, 2, *x.shape[1:])
    return cells.permute(0, 4, 1, 5, 2, 6, 3).flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, time - 1 :]


def _norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / x.square().sum(0).sqrt().clamp(min=1e-12) * math.sqrt(len(x)) * w[f"{name}.gamma"].view(-1, 1, 1, 1)


def _conv(w: Weights, name: str, x: Tensor, stride: tuple[int, int, int] = (1, 1, 1)) -> Tensor:
    """Convolve in space, or so that a frame reads itself and earlier ones, which are zero before the first."""
    weight = w[f"{name}.weight"] if w[f"{name}.weight"].dim() == 5 else w[f"{name}.weight"].unsqueeze(2)
    time, side = weight.shape[2] - 1, weight.shape[3] // 2
    sides = (0, 1, 0, 1) if stride[1] == 2 else (side, side, side, side)
    return conv3d(pad(x, (*sides, time, 0)), weight, w[f"{name}.bias"], stride=stride)


def _read(folder: Path) -> Weights:
    return {name: value.float() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _part(w: Weights, name: str) -> Weights:
    return {key.removeprefix(f"{name}."): value for key, value in w.items() if key.startswith(f"{name}.")}


def _parts(w: Weights, name: str) -> list[Weights]:
    listed = _part(w, name)
    return [_part(listed, str(number)) for number in sorted({int(key.split(".")[0]) for key in listed})]


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), heads, -1).transpose(0, 1)
