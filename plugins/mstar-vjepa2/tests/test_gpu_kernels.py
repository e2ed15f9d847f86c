"""Every kernel of V-JEPA 2 once, at small and odd sizes: what `make sanitize` watches."""

from __future__ import annotations

import pytest
import torch

from mstar_vjepa2.rotary import Rotary3D
from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 12, 26])
def test_kernels_of_angles(head_dim: int) -> None:
    cosine, sine = Rotary3D(head_dim).to("cuda").of_ids(torch.arange(37, device="cuda"), 4, 4)
    assert cosine.shape == sine.shape == (37, 1, head_dim) and (cosine**2 + sine**2 - 1).abs().max() < 1e-5
    rest = 6 * (head_dim // 3 // 2)
    assert (cosine[..., rest:] == 1).all() and not sine[..., rest:].any()


@pytest.mark.parametrize(("heads", "head_dim", "rows"), [(16, 64, 258), (3, 12, 7), (9, 26, 1)])
def test_kernels_of_rotation(heads: int, head_dim: int, rows: int) -> None:
    """In place, on the way into the cache, and behind the product that makes what turns."""
    from mstar_vjepa2 import fused, tiles

    rotation = Rotary3D(head_dim).to("cuda").of_ids(torch.arange(rows, device="cuda"), 4, 4)
    x, page = torch.randn(2, rows, 3 * heads, head_dim, device="cuda").bfloat16(), 11
    assert fused.turn(x[:, :, : 2 * heads], *rotation).isfinite().all()
    pool = torch.zeros(rows // page + 1, 2, page, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(rows, device="cuda")
    places = at // page * 2 * page + at % page
    places[-1] = -1
    assert fused.turn_append(pool, places, x[0].flatten(1), rotation, heads).isfinite().all()
    weight = torch.randn(3 * heads * head_dim, 512, device="cuda").bfloat16()
    if tiles.takes(weight) and tiles.turns(weight, pool, head_dim):
        given = torch.randn(rows, 512, device="cuda").bfloat16()
        query = tiles.turned(given, weight, weight[:, 0].contiguous(), rotation, pool, places)
        assert query.shape == (rows, heads, head_dim) and query.isfinite().all() and pool.isfinite().all()


@pytest.mark.parametrize("rows", [3, 258])
def test_kernels_of_products(rows: int) -> None:
    from mstar_vjepa2 import tiles

    x, weight = torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16()
    assert tiles.takes(weight)
    for made in (tiles.whole(x, weight, weight[:, 0].contiguous()), tiles.parts(x, weight).sum(0)):
        assert made.shape == (rows, 256) and made.isfinite().all()
    assert tiles.whole(x, weight, weight[:, 0].contiguous(), is_gelu=True).isfinite().all()


@pytest.mark.parametrize("width", [36, 1024])
def test_kernels_of_poses(width: int) -> None:
    from mstar_vjepa2 import fused

    layer, values = torch.nn.Linear(7, width, device="cuda").requires_grad_(False), torch.randn(3, 2, 7, device="cuda")
    x = torch.zeros(3, 4, width, device="cuda")
    fused.pose(values[:, 1], layer, x[:, 2])
    assert (x[:, 2] - layer(values[:, 1])).abs().max() < 1e-5 and not x[:, 3].any()


def test_kernels_of_latents() -> None:
    from mstar_vjepa2.encoder import latents_of

    hidden = torch.randn(3, 5, 1408, device="cuda").bfloat16()
    found = latents_of(hidden, torch.tensor([1, 0, 1], device="cuda")[:, None].expand(-1, 2)[:, 0])
    assert (found.cpu() - latents_of(hidden.cpu(), torch.tensor([True, False, True]))).abs().max() < 1e-4


def test_kernels_are_all_run_here() -> None:
    """A kernel that is new has to be reached from here: else nobody looks for its errors."""
    test_kernels_of_angles(12)
    test_kernels_of_latents()
    test_kernels_of_poses(36)
    test_kernels_of_rotation(16, 64, 258)
    test_kernels_of_products(3)
    torch.cuda.synchronize()
    found = launched("mstar_vjepa2")
    assert found and all(found.values()), {name for name, has_run in found.items() if not has_run}
