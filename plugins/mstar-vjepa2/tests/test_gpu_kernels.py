"""Every kernel of V-JEPA 2 once, at small and odd sizes: what `make sanitize` watches."""

from __future__ import annotations

import pytest
import torch

from mstar_vjepa2.rotary import Rotary3D
from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_dim", "batch"), [(16, 64, 2), (3, 12, 3), (9, 26, 1)])
def test_kernels_of_rotation(heads: int, head_dim: int, batch: int, dtype: torch.dtype) -> None:
    from mstar_vjepa2 import fused

    device, tokens = torch.device("cuda", 0), 37
    x = torch.randn(batch, tokens, 3, heads, head_dim, device=device).to(dtype)
    cosine, sine = Rotary3D(head_dim).to(device).of_ids(torch.arange(tokens, device=device), 4, 4)
    for given in (x.unbind(-3)[1], x.unbind(-3)[2][0]):
        assert fused.is_taken(given, cosine)
        made = fused.turn(given, cosine, sine)
        assert made.shape == given.shape and made.isfinite().all()


def test_kernels_are_all_run_here() -> None:
    """A kernel that is new has to be reached from here: else nobody looks for its errors."""
    test_kernels_of_rotation(3, 12, 2, torch.bfloat16)
    torch.cuda.synchronize()
    found = launched("mstar_vjepa2")
    assert found and all(found.values()), {name for name, has_run in found.items() if not has_run}
