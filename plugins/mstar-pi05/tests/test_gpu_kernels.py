"""Every kernel of Pi0.5 once, at small and odd sizes: what `make sanitize` watches. Values are looked at elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "width", "parts"), [(1, 100, 0), (7, 100, 3), (3, 1024, 1)])
def test_kernels_of_gated_norms(tokens: int, width: int, parts: int, dtype: torch.dtype) -> None:
    from mstar_pi05 import fused

    device, norms, times = torch.device("cuda", 0), 3, 5
    table = torch.randn(norms, times, 3 * width, device=device)
    rows = torch.arange(tokens, device=device) % times
    slices = torch.randn(max(parts, 1), tokens, width, device=device)
    branch = None if parts == 0 else slices if parts > 1 else slices[0].to(dtype)
    for number in range(1, norms):
        made = fused.modulate(
            torch.randn(tokens, width, device=device), branch, table, number, rows, 1e-6, (dtype, dtype)
        )
        assert all(value.shape == (tokens, width) and value.isfinite().all() for value in made)


@pytest.mark.parametrize("tokens", [1, 33])
def test_kernels_of_the_end_of_a_step(tokens: int) -> None:
    from mstar_pi05 import fused

    actions, velocity, scale, offset = torch.randn(4, tokens, 32, device="cuda:0").unbind()
    for num_steps in (torch.tensor(7, device="cuda:0").expand(tokens), torch.arange(1, tokens + 1, device="cuda:0")):
        assert all(value.isfinite().all() for value in fused.land(actions, velocity, num_steps, scale, offset))


def test_kernels_are_all_run_here() -> None:
    """A kernel that is new has to be reached from here: else nobody looks for its errors."""
    test_kernels_of_gated_norms(7, 100, 3, torch.bfloat16)
    test_kernels_of_the_end_of_a_step(5)
    torch.cuda.synchronize()
    found = launched("mstar_pi05")
    assert found and all(found.values()), {name for name, has_run in found.items() if not has_run}
