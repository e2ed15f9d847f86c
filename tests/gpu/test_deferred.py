"""A node that is quantized layer by layer never has its half-precision weights on the GPU at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mstar_core.layers import Checkpoint, load_weights
from mstar_core.weights.building import building
from mstar_core.weights.deferred import DeferredWeights

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, INNER = 24, 1024, 4096


def layers() -> nn.ModuleList:
    from mstar_core.layers import GatedMLP

    return nn.ModuleList([GatedMLP(WIDTH, INNER) for _ in range(LAYERS)])


def test_the_device_holds_one_layer_in_half_precision(cuda: torch.device, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    from mstar_core.layers.quantize import quantize_onto

    with building(cuda, torch.bfloat16):
        made = layers()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    save_file({name: value.detach().cpu() for name, value in made.state_dict().items()}, tmp_path / "model.safetensors")
    whole = sum(parameter.numel() * 2 for parameter in made.parameters())
    expected = made[3].down_proj.weight.detach().clone()
    del made, parameter
    deferred = DeferredWeights()
    with building(cuda, torch.bfloat16, deferred):
        module = layers()
    load_weights(module, Checkpoint.find(tmp_path), deferred=deferred)
    module.requires_grad_(False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    quantize_onto(cuda, module, "fp8", place=deferred.place)
    torch.cuda.synchronize(cuda)
    peak = torch.cuda.max_memory_allocated(cuda) - before
    # Half of the weights, and one layer with float32 copies of a weight.
    assert peak < 0.8 * whole, f"{peak:,} of {whole:,} bytes"
    kept = module[3].down_proj
    values, scale = kept.weight, kept.scale
    error = (values.float() * scale.float().view(-1, 1) - expected.float()).norm() / expected.float().norm()
    assert float(error) < 0.04
