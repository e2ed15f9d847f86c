"""Rectified flow: embeddings of time and latent position, guidance, the Euler step, and the first noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.functional import silu

from mstar_bagel.params import CHANNEL, GLOBAL, RENORM_TYPES, TEXT_CHANNEL
from mstar_core.engine.module import NodeModule
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

TIME_FEATURES: Final = 256
"""Width of the sinusoidal features of a flow time."""

LONGEST_PERIOD: Final = 10000.0
EPSILON: Final = 1e-8
"""Added to a norm before division. Source: the specification, section 8.1."""


def time_features(times: Tensor) -> Tensor:
    """Return cosines, then sines: float32 [n, 256]. times: [n], flow times in [0, 1], not scaled."""
    half = TIME_FEATURES // 2
    # A constant of the graph: computed on the device, without a copy from the host.
    exponents = torch.arange(half, dtype=torch.float32, device=times.device) * (-math.log(LONGEST_PERIOD) / half)
    angles = times.float()[:, None] * exponents.exp()[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbedder(nn.Module):
    """Embedding of a flow time. Parameters are named as in the checkpoint: mlp.0 and mlp.2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleList([nn.Linear(TIME_FEATURES, width), nn.Identity(), nn.Linear(width, width)])

    def forward(self, times: Tensor) -> Tensor:
        """Return [n, width] in the weights' dtype. times: float32 [n]."""
        first, _, last = self.mlp
        assert isinstance(first, nn.Linear)
        out: Tensor = last(silu(first(time_features(times).to(first.weight.dtype))))
        return out


class GridTable(nn.Module):
    """Position table of a square grid, stored in the weights. Row r * side + c belongs to row r and column c."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side * side, width))

    def forward(self, height: int, width: int) -> Tensor:
        """Return [height * width, table width], anchored at the top left, whatever the image's own width."""
        table = self.pos_embed.view(self.side, self.side, -1)
        return table[:height, :width].flatten(0, 1)


def guided(
    v: Tensor, v_text: Tensor, v_image: Tensor, *, text_scale: float, image_scale: float, renorm: int, least: float
) -> Tensor:
    """Combine the velocities of one image, float32 [..., channels], by the specification's section 8.1.

    renorm: index in RENORM_TYPES. least: smallest factor of the norm bound. A text scale of at most 1 returns v.
    """
    if text_scale <= 1:
        return v
    toward_text = v_text + text_scale * (v - v_text)
    kind = RENORM_TYPES[renorm]
    if kind == TEXT_CHANNEL:
        bounded = toward_text * _factor(v, toward_text, least, per_token=True)
        return v_image + image_scale * (bounded - v_image) if image_scale > 1 else bounded
    assert kind in (GLOBAL, CHANNEL)
    mixed = v_image + image_scale * (toward_text - v_image) if image_scale > 1 else toward_text
    return mixed * _factor(v, mixed, least, per_token=kind == CHANNEL)


def _factor(v: Tensor, mixed: Tensor, least: float, *, per_token: bool) -> Tensor:
    """Return the factor that bounds the norm of `mixed` by that of v: [..., 1] per token, or one scalar."""
    if per_token:
        norms = v.norm(dim=-1, keepdim=True), mixed.norm(dim=-1, keepdim=True)
    else:
        norms = v.norm(), mixed.norm()
    factor: Tensor = norms[0] / (norms[1] + EPSILON)
    return factor.clamp(least, 1.0)


class FlowSteps(nn.Module, NodeModule):
    """The node `combine_cfg`: first noise of an image, then guidance and one Euler step. It has no weights.

    Images are computed one by one, so results do not depend on the batch, and norms never mix requests.
    """

    host_ports = ("guidance", "times", "step", "grid", "seeds")
    device_outputs = ("latents", "history", "progress")  # progress is computed on the host, so it is ready at once

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self._channels = channels
        self._device = device

    def forward(
        self,
        *,
        seeds: np.ndarray,
        grid: Sequence[np.ndarray] | None = None,
        latents: Sequence[Tensor] = (),
        history: Sequence[Tensor] = (),
        v: Sequence[Tensor] = (),
        guidance: Sequence[np.ndarray] = (),
        times: Sequence[np.ndarray] = (),
        step: np.ndarray | None = None,
        v_text: Sequence[Tensor] | None = None,
        v_img: Sequence[Tensor] | None = None,
    ) -> dict[str, list[Tensor]]:
        """Return {"latents", "history": B tensors each}, float32 [h, w, channels], as are latents and velocities.

        history: the guided velocity of the step before, which a step with a slope length extrapolates with its own.
        seeds: int64 [B]. With grid, an array [h, w] per image of which only the shape is read: the first noise. Else a
        step. guidance: float32 [5] per image; times: float32 [steps, 4], see `request.schedule.steps`; step: int64 [B].
        All these are on the host. Without v_img the velocity of main takes its place; without v_text nothing is guided.
        A step also returns {"progress": B tensors}, int64 [2] on the host: steps done and all steps.
        """
        if grid is not None:
            pairs = zip(grid, seeds, strict=True)
            noise = [self.noise((cells.shape[0], cells.shape[1]), int(seed)) for cells, seed in pairs]
            return {"latents": noise, "history": [torch.zeros_like(x) for x in noise]}
        assert step is not None
        moved, told, velocities = [], [], []
        for item, x in enumerate(latents):
            _, length, number, slope = (float(value) for value in times[item][int(step[item])])
            velocity = v[item]
            if v_text is not None:
                values = guidance_values(guidance[item])
                velocity = guided(velocity, v_text[item], velocity if v_img is None else v_img[item], **values)
            following = x - velocity * length
            moved.append(following - (velocity - history[item]) * slope if slope else following)
            velocities.append(velocity)
            told.append(torch.tensor([round(number) + 1, round(float(guidance[item][4]))]))
        return {"latents": moved, "progress": told, "history": velocities}

    def noise(self, size: tuple[int, int], seed: int) -> Tensor:
        """Return normal noise, float32 [rows, columns, channels].

        It comes from a generator of its own on the host, as in the reference, which seeds the global one.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(size[0] * size[1], self._channels, generator=generator)
        return upload(drawn.view(*size, self._channels), self._device)


def guidance_values(numbers: np.ndarray) -> dict[str, Any]:
    """Return the arguments of `guided` from the port `guidance`."""
    text_scale, image_scale, renorm, least = (float(number) for number in numbers[:4])
    return {"text_scale": text_scale, "image_scale": image_scale, "renorm": round(renorm), "least": least}
