"""Every kernel of Qwen3-Omni's encoders, code predictor and vocoder once, at small and odd sizes, for `make sanitize`.

Other tests check values.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("rows", "steps"), [(1, 2), (3, 37)])
def test_kernels_of_the_decoder(rows: int, steps: int, dtype: torch.dtype) -> None:
    from mstar_qwen3omni.checkpoint.config import VocoderSizes
    from mstar_qwen3omni.vocoder.decoder import decoding
    from mstar_qwen3omni.vocoder.fused_decoder import FusedDecoder

    layers = decoding(VocoderSizes(width=40, decoder=96, rates=(4, 3))).cuda().requires_grad_(False)
    decoder = FusedDecoder(layers, dtype)
    inputs = torch.randn(rows, steps, 40, device="cuda")
    samples = ((steps - 1) * 4 - 1) * 3
    assert decoder.decode(inputs, is_pcm=True).shape == (rows, samples)
    actual = decoder.decode(inputs, is_pcm=False)
    assert actual.isfinite().all() and actual.abs().max() <= 1


@pytest.mark.parametrize(("frames", "patches", "heads", "head_dim"), [(1, 1, 1, 72), (2, 130, 2, 72), (3, 64, 1, 32)])
def test_kernels_of_attention_among_patches(frames: int, patches: int, heads: int, head_dim: int) -> None:
    from mstar_qwen3omni.encoders import kernels

    packed = torch.randn(frames * patches, 3 * heads, head_dim, device="cuda", dtype=torch.bfloat16)
    query, key, value = (packed[:, start * heads : (start + 1) * heads] for start in range(3))
    assert kernels.attention(query, key, value, frames).isfinite().all()


def test_every_kernel_has_run() -> None:
    test_kernels_of_the_decoder(1, 5, torch.float16)
    test_kernels_of_attention_among_patches(1, 5, 1, 72)
    assert all(launched("mstar_qwen3omni").values())
