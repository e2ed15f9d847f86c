"""Every kernel of BAGEL at small and odd sizes, for `make sanitize`. Other tests check values."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 1, 1), (3, 64, 5, 7), (1, 96, 64, 65), (1, 32, 64, 64)], ids=str)
def test_kernels_of_group_norms(shape: tuple[int, ...], is_active: bool) -> None:
    from mstar_bagel.nodes.group_norm import group_norm

    norm = torch.nn.GroupNorm(32, shape[1], 1e-6, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    actual = group_norm(torch.randn(shape, device="cuda", dtype=torch.bfloat16), norm, is_active=is_active)
    assert actual.shape == shape and actual.isfinite().all()


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("lengths", [(1,), (7, 7, 33), (33, 1, 7)], ids=str)
def test_kernels_of_joined_projections(lengths: tuple[int, ...], parts: int) -> None:
    from mstar_bagel.graph import MARKERS
    from mstar_bagel.nodes.kernels import Images, Joined, join_qkv

    heads, kv_heads, head_dim = 3, 1, 64
    across, markers = (heads + 2 * kv_heads) * head_dim, MARKERS * len(lengths)
    tokens = sum(lengths) + markers
    gen = torch.randn(sum(lengths), across, device="cuda", dtype=torch.bfloat16)
    und = torch.randn(*([parts] if parts else []), markers, across, device="cuda").to(
        torch.float32 if parts else torch.bfloat16
    )
    gains = torch.randn(4, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
    norms = (gains[0], gains[1], 1e-6), (gains[2], gains[3], 1e-6)
    rotation = torch.randn(2, tokens, 1, head_dim, device="cuda").unbind()
    joined, token = Joined.empty(tokens, (heads, kv_heads), head_dim, like=gen), 0
    for number, length in enumerate(lengths):
        images = Images(length=length, count=1, token=token, number=number)
        join_qkv((gen, und), norms, (rotation[0], rotation[1]), joined, images)
        token += length
    assert all(each.isfinite().all() for each in (joined.query, joined.key, joined.value))


def test_kernels_are_all_run_here() -> None:
    """Every kernel must run in this module, so that the sanitizer checks it."""
    test_kernels_of_group_norms((3, 64, 5, 7), is_active=True)
    test_kernels_of_joined_projections((7, 33), 3)
    torch.cuda.synchronize()
    actual = launched("mstar_bagel")
    assert actual and all(actual.values()), {name for name, has_run in actual.items() if not has_run}
