"""Fused convolutions with SnakeBeta against torch: zeros or earlier steps before the first, residuals, upsampling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import conv1d, conv_transpose1d, pad

from mstar_core.layers.snake_conv import FusedConv, FusedOutput, SnakeBeta, convolve, samples_of

pytestmark = pytest.mark.gpu
LIMIT = 2e-5
"""Of float32 with `tf32x3`, for values near 1."""


def snake_of(channels: int) -> SnakeBeta:
    made = SnakeBeta(channels)
    nn.init.normal_(made.alpha, std=0.3)
    nn.init.normal_(made.beta, std=0.3)
    return made


@pytest.mark.parametrize("has_past", [False, True])
@pytest.mark.parametrize(("inner", "outer", "kernel", "dilation"), [(40, 24, 7, 1), (96, 96, 7, 9), (33, 17, 1, 1)])
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (3, 70)])
def test_a_causal_convolution_equals_torch(
    rows: int, steps: int, inner: int, outer: int, kernel: int, dilation: int, has_past: bool, cuda: torch.device
) -> None:
    torch.manual_seed(1)
    conv, after = nn.Conv1d(inner, outer, kernel, dilation=dilation), snake_of(outer)
    reach = (kernel - 1) * dilation
    past = torch.randn(rows, inner, reach) if has_past else torch.zeros(rows, inner, reach)
    x, residual = torch.randn(rows, inner, steps), torch.randn(rows, outer, steps)
    wide = conv1d(torch.cat([past, x], 2), conv.weight, conv.bias, dilation=dilation) + residual
    fused = FusedConv.causal(conv.to(cuda), after.to(cuda), torch.float32)
    given = torch.cat([past, x], 2) if has_past else x
    made = convolve(
        fused,
        given.to(cuda).transpose(1, 2).contiguous(),
        residual.to(cuda).transpose(1, 2).contiguous(),
        keeps_wide=True,
        has_past=has_past,
    )
    for found, expected in zip(made, (wide, after.cpu()(wide)), strict=True):
        torch.testing.assert_close(found.transpose(1, 2).cpu(), expected.detach(), atol=LIMIT, rtol=LIMIT)


def test_a_result_goes_behind_room_for_earlier_steps(cuda: torch.device) -> None:
    conv, x = nn.Conv1d(32, 16, 7).to(cuda), torch.randn(3, 70, 32, device=cuda)
    fused = FusedConv.causal(conv, snake_of(16).to(cuda), torch.float32)
    memory = torch.full((3, 5 + 70, 16), 7.0, device=cuda)
    wide, _ = convolve(fused, x, keeps_wide=True, into=memory[:, 5:])
    for found, expected in zip((wide, memory[:, 5:]), convolve(fused, x, keeps_wide=True), strict=True):
        assert torch.equal(found, expected)
    assert bool((memory[:, :5] == 7).all())


@pytest.mark.parametrize(("inner", "outer", "steps"), [(128, 256, 70), (192, 96, 9), (256, 768, 300)])
def test_bits_of_a_window_do_not_depend_on_their_number(inner: int, outer: int, steps: int, cuda: torch.device) -> None:
    torch.manual_seed(1)
    fused = FusedConv.causal(nn.Conv1d(inner, outer, 7).to(cuda), snake_of(outer).to(cuda), torch.float16)
    x = torch.randn(48, steps, inner, device=cuda, dtype=torch.float16)
    many = convolve(fused, x, keeps_wide=True)
    for found, expected in zip(convolve(fused, x[3:4].contiguous(), keeps_wide=True), many, strict=True):
        assert torch.equal(found[0], expected[3])


@pytest.mark.parametrize("rate", [2, 5])
def test_an_upsampling_equals_torch(rate: int, cuda: torch.device) -> None:
    torch.manual_seed(1)
    conv, after, x = nn.ConvTranspose1d(24, 12, 2 * rate, rate), snake_of(12), torch.randn(2, 24, 9)
    whole = conv_transpose1d(x, conv.weight, conv.bias, rate)[:, :, rate : 9 * rate]
    fused = FusedConv.upsampling(conv.to(cuda), after.to(cuda), torch.float32)
    made = convolve(fused, x.to(cuda).transpose(1, 2).contiguous(), keeps_wide=True)
    for found, expected in zip(made, (whole, after.cpu()(whole)), strict=True):
        samples = found.reshape(2, 8 * rate, 12).transpose(1, 2).cpu()
        torch.testing.assert_close(samples, expected.detach(), atol=LIMIT, rtol=LIMIT)


def test_samples_equal_torch(cuda: torch.device) -> None:
    torch.manual_seed(1)
    conv, x = nn.Conv1d(20, 1, 7), torch.randn(2, 20, 100)
    expected = conv1d(pad(x, (6, 0)), conv.weight, conv.bias)[:, 0].clamp(-1, 1).detach()
    output, bent = FusedOutput.of(conv.to(cuda)), x.to(cuda).transpose(1, 2).contiguous()
    torch.testing.assert_close(samples_of(output, bent, is_pcm=False).cpu(), expected, atol=LIMIT, rtol=LIMIT)
    assert (samples_of(output, bent, is_pcm=True).cpu().int() - (expected * 32767).round().int()).abs().max() <= 1
