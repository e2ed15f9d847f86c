"""Every kernel of Pi0.5 once, at small and odd sizes, for `make sanitize`. Other tests check values."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "width", "parts"), [(1, 100, 0), (7, 100, 3), (3, 1024, 1)])
def test_kernels_of_gated_norms(tokens: int, width: int, parts: int, dtype: torch.dtype) -> None:
    from mstar_pi05.kernels import adaptive_norm

    device, norms, times = torch.device("cuda", 0), 3, 5
    table = torch.randn(norms, times, 3 * width, device=device)
    rows = torch.arange(tokens, device=device) % times
    slices = torch.randn(max(parts, 1), tokens, width, device=device)
    branch = None if parts == 0 else slices if parts > 1 else slices[0].to(dtype)
    for number in range(1, norms):
        actual = adaptive_norm.modulate(
            torch.randn(tokens, width, device=device), branch, table, number, rows, 1e-6, (dtype, dtype)
        )
        assert all(value.shape == (tokens, width) and value.isfinite().all() for value in actual)


@pytest.mark.parametrize("tokens", [1, 33])
def test_kernels_of_the_ends_of_a_step(tokens: int) -> None:
    from mstar_pi05.kernels import embed_head
    from mstar_pi05.nodes.flow import TimeTable, distinct_times

    device, width = torch.device("cuda", 0), 100
    times, places = distinct_times(4)
    table = TimeTable(torch.randn(3, len(times), 3 * width, device=device), places.to(device))
    into, out_of = (
        torch.nn.Linear(*sizes, device=device).requires_grad_(False) for sizes in ((32, width), (width, 32))
    )
    outside = embed_head.StepWeights(
        into=into, out_of=out_of, table=table, frequencies=torch.rand(12, device=device), eps=1e-6, dtype=torch.bfloat16
    )
    actions, scale, offset = torch.randn(3, tokens, 32, device=device).unbind()
    for num_steps in (torch.tensor(3, device=device).expand(tokens), torch.arange(tokens, device=device) % 2 + 3):
        step = torch.tensor(2, device=device).expand(tokens)
        asked = embed_head.StepInputs(actions=actions, scale=scale, offset=offset, step=step, num_steps=num_steps)
        begun = embed_head.embed(outside, asked, torch.arange(tokens, device=device))
        actual = embed_head.head(outside, asked, begun.rows, begun.x, torch.randn(3, tokens, width, device=device))
        assert all(value.isfinite().all() for value in (begun.x, begun.normed, *begun.rotation, *actual))


@pytest.mark.parametrize("tokens", [1, 33])
def test_kernels_that_hold_their_weights(tokens: int) -> None:
    from mstar_pi05.kernels import small_gemm

    device, width, inner = torch.device("cuda", 0), 128, 512
    x, angle = torch.randn(tokens, width, device=device).bfloat16(), torch.randn(tokens, 1, 64, device=device)
    actual = small_gemm.qkv_rotary(x, torch.randn(10 * 64, width, device=device).bfloat16(), (angle, angle), 8, 1)
    opened = small_gemm.gate_up_gelu(x, torch.randn(2 * inner, width, device=device).bfloat16())
    summed = small_gemm.split_k(opened, torch.randn(width, inner, device=device).bfloat16())
    assert all(value.isfinite().all() for value in (*actual, opened, summed))


@pytest.mark.parametrize(("images", "tokens", "heads", "head_dim"), [(1, 33, 2, 72), (2, 64, 1, 16)])
def test_kernels_of_cameras(images: int, tokens: int, heads: int, head_dim: int) -> None:
    from mstar_pi05.kernels import vision_attention

    width = heads * head_dim
    seen = vision_attention.attention(torch.randn(images, tokens, 3 * width, device="cuda"), heads)
    assert seen.shape == (images, tokens, width) and seen.isfinite().all()


def test_kernels_are_all_run_here() -> None:
    """Every kernel must run in this module, so that the sanitizer checks it."""
    test_kernels_of_gated_norms(7, 100, 3, torch.bfloat16)
    test_kernels_of_the_ends_of_a_step(5)
    test_kernels_that_hold_their_weights(5)
    test_kernels_of_cameras(1, 33, 2, 72)
    torch.cuda.synchronize()
    actual = launched("mstar_pi05")
    assert actual and all(actual.values()), {name for name, has_run in actual.items() if not has_run}
