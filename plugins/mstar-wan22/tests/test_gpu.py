"""Wan 2.2 on a GPU: float32 equals the CPU within the tolerance of another device, bfloat16 stays near it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mstar_core.engine.device import prepare_device
from mstar_core.plugin.model import ModelContext
from mstar_wan22.nodes import token_kernels
from mstar_wan22.plugin import mstar_models
from mstar_wan22.request.schedule import step_table
from mstar_wan22.sources.tiny import write_wan22, write_wan22_a14b, write_wan22_i2v_a14b

pytestmark = pytest.mark.gpu

WRITERS = {"wan22": write_wan22, "wan22_a14b": write_wan22_a14b, "wan22_i2v_a14b": write_wan22_i2v_a14b}
SPECS = {spec.name: spec for spec in mstar_models()}
GRID = (3, 4, 6)


def outputs(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the guided velocity of a step, and the frames of two chunks, on the host."""
    from mstar_wan22.model import Wan22

    if device.type == "cuda":
        prepare_device(device)
    spec = SPECS[name].bound(folder, {})
    model = Wan22(ModelContext(spec=spec, folder=folder, device=device, dtype=dtype))
    draw = torch.Generator().manual_seed(5)
    denoiser = model.get_submodule(spec.node("transformer"))
    decoder = model.get_submodule(spec.node("vae_decoder"))
    channels = int(spec.node("solver").port("latents").shape[0])
    latents = torch.randn((channels, *GRID), generator=draw).to(device)
    text = torch.randn((7, 32), generator=draw).to(device, dtype)
    table, _ = step_table(4, 5.0, (5.0, 5.0), None, "diffusers", "unipc")
    condition = None
    if name == "wan22_i2v_a14b":
        condition = [torch.randn((4 + channels, *GRID), generator=draw).to(device)]
    velocity = denoiser(
        latents=[latents], text=[text], negative=[text[:3]], steps=[table], step=np.array([1]), condition=condition
    )["velocity"][0]
    memory, frames = torch.empty(0, device=device, dtype=dtype), []
    for number in range(2):
        made = decoder(latents=[latents], memory=[memory], step=np.array([number]))
        memory = made["memory"][0]
        frames.append(made["frames"][0].float().cpu())
    return [velocity.float().cpu(), torch.cat(frames)]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 0.06)])
def test_a_step_and_its_frames(name: str, dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    """Errors are relative, in the norm of all values."""
    folder = WRITERS[name](tmp_path / name)
    with torch.inference_mode():
        wanted = outputs(name, folder, torch.device("cpu"), torch.float32)
        found = outputs(name, folder, torch.device("cuda", 0), dtype)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= limit * other.norm()


PARTS = {
    "modulated": lambda x, m, weight, angles, spans: token_kernels.modulated(x, m[0], m[1], spans, 1e-6),
    "add_gated": lambda x, m, weight, angles, spans: token_kernels.add_gated(x, x.flip(1).contiguous(), m[2], spans),
    "normed": lambda x, m, weight, angles, spans: token_kernels.normed(x, weight, 1e-6),
    "turned": lambda x, m, weight, angles, spans: token_kernels.turned(x, weight, angles.cos(), angles.sin(), 4, 1e-6),
    "shifted": lambda x, m, weight, angles, spans: token_kernels.shifted(x, shifting(weight)),
}


def shifting(weight: torch.Tensor) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(weight.shape[0], eps=1e-6, device=weight.device)
    norm.weight.data, norm.bias.data = weight, 0.5 * weight
    return norm


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spans", [(70,), (6, 64), (0, 70), (70, 0)])
def test_kernels_of_tokens_equal_the_torch_functions(part: str, spans: tuple[int, ...]) -> None:
    """The limit is two steps of bfloat16 near 8."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn((2, 70, 96), generator=draw).bfloat16()
    modulation = torch.randn((2, len(spans), 6, 96), generator=draw)
    weight, angles = 1 + 0.2 * torch.randn(96, generator=draw), torch.randn((70, 12), generator=draw)
    with torch.inference_mode():
        wanted = PARTS[part](x, modulation.unbind(2), weight, angles, spans)
        device = torch.device("cuda", 0)
        moved = (each.to(device) for each in (x, modulation, weight, angles))
        on_device = [each.unbind(2) if each.dim() == 4 else each for each in moved]
        found = PARTS[part](*on_device, spans)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu().float(), wanted.float(), atol=0.07, rtol=0)
