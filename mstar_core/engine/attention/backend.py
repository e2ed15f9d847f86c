"""Contract and table of attention backends, and the KV pools. Used by the KV engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch

from mstar_core.errors import NotFound, StartError, did_you_mean
from mstar_core.targets import load_target

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.static import StaticAttention
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
    from mstar_core.engine.steps.updates import PageCopy
    from mstar_core.graph.declare.nodes import KVSpec
    from mstar_core.layers.kv_view import KVView

BACKENDS: Final = {
    "torch": "mstar_core.engine.attention.pytorch:TorchAttention",
    "flashinfer": "mstar_core.engine.attention.flashinfer:FlashInferAttention",
}
"""Name -> class path."""


class AttentionBackend(Protocol):
    """Attention over the pools of all layers. Made once per node."""

    name: str

    def plan(self, metadata: AttentionMetadata) -> KVView:
        """Prepare one forward. The view is valid until the next step changes the tables."""

    def static(self, shape: AttentionShape) -> StaticAttention:
        """Make the attention of one bucket of captured steps. Padding uses the spare page, the last of the pools."""

    def pass_pages(self, most_pages: int) -> list[int]:
        """Return the page counts that passes need a bucket for, ascending; the last is `most_pages`."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages whose earlier values must not be read, not even behind a mask."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages of every layer before the next forward."""


def backend(name: str, pools: list[Tensor], page_size: int, windows: Sequence[int] = ()) -> AttentionBackend:
    """Make the attention backend called `name`. windows: see `KVSpec`.

    Raises NotFound for an unknown name and StartError if the backend cannot run here. There is no fallback.
    """
    if name not in BACKENDS:
        raise NotFound(
            f"no attention backend is called {name!r}",
            hint=did_you_mean(name, BACKENDS),
            kind="attention backend",
            name=name,
        )
    try:
        attention = load_target(BACKENDS[name])(pools, page_size, windows)
    except ImportError as error:
        raise StartError(
            f"the attention backend {name!r} cannot be loaded",
            f"missing: {error.name or error}",
            "pip install 'mstarctl[cuda]', or set attention to \"torch\"",
            phase="kernels",
        ) from error
    return cast("AttentionBackend", attention)


def make_pools(spec: KVSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One pool per layer: [pages + 1, 2 (keys, values), page_size, kv_heads, head_dim], zeroed.

    The last page is spare: captured steps use it for padding.
    """
    shape = (pages + 1, 2, page_size, spec.kv_heads, spec.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]
