"""A tiny world model: each pass is one frame of a row, from its action and the frames in the row's cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.nodes import KV_CACHE, Attend, KVSpec, NodeSpec
from mstar_core.layers.kv_view import KVView
from tests.engine.tiny_engine import LAYERS, WIDTH, TinyLM, make_engine

PATCHES = 3
WORLD = NodeSpec(
    name="world",
    engine=KV_CACHE,
    ports={
        "frame": f"f32[{PATCHES},{WIDTH}]",
        "actions": f"f32[h,{WIDTH}]",
        "next_frame": f"f32[{PATCHES},{WIDTH}]",
        "norm": "f32",
        "never": "b8",
    },
    kv=KVSpec(layers=LAYERS, kv_heads=2, head_dim=8, rows=6),
    row_ports=("frame", "actions", "next_frame", "norm", "never"),
    batch_key=("frame",),
)
FRAME = Attend(mask="full", positions="shared", tokens=PATCHES)
TRIAL = Attend(mask="full", positions="shared", tokens=PATCHES, keep="loop")


class TinyWorld(nn.Module):
    """Two blocks of TinyLM over frames. passes: rows of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.passes: list[int] = []

    def forward(
        self, kv: KVView, positions: Tensor, step: Tensor, frame: Tensor, actions: Tensor | list[Tensor]
    ) -> dict[str, Tensor]:
        rows = len(frame)
        self.passes.append(rows)
        at = step.view(rows, PATCHES)[:, 0]
        chosen = torch.stack([each[int(now)] for each, now in zip(actions, at, strict=True)])
        x = (frame + chosen[:, None]).reshape(rows * PATCHES, WIDTH)
        rotation = self.lm.rotary(positions)
        for block in self.lm.blocks:
            x = block(x, kv, rotation)
        following = self.lm.norm(x).tanh().view(rows, PATCHES, WIDTH)
        return {"next_frame": following, "norm": following.square().mean(dim=(1, 2)), "never": at < 0}

    def head(self, hidden: Tensor) -> Tensor:
        raise AssertionError("no ids are drawn")


def make_world(**changes: object) -> KVCacheEngine:
    """A small CPU engine around TinyWorld."""
    settings: dict[str, object] = {"spec": WORLD, "module": TinyWorld(), "vocab": 0, "page_size": PATCHES}
    return make_engine(**{**settings, **changes})


def numbers(seed: int, *shape: int) -> Tensor:
    """Random values of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
