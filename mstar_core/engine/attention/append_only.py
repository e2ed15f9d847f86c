"""Views of passes that only fill the cache. Made by captured passes; see `kv_view.AppendOnlyView`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_core.layers.kv_view import PlacedView

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView


@dataclass(frozen=True, slots=True)
class AppendOnly:
    """An AppendOnlyView over a KVView."""

    inner: KVView

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        return self.inner.attend(layer, query, key, value, scale)


@dataclass(frozen=True, slots=True)
class AppendOnlyPlaced:
    """An AppendOnlyView over a PlacedView."""

    inner: PlacedView

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        return self.inner.attend(layer, query, key, value, scale)

    def places(self, layer: int) -> tuple[Tensor, Tensor]:
        """See PlacedView."""
        return self.inner.places(layer)

    def attend_placed(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See PlacedView."""
        return self.inner.attend_placed(layer, query, scale)


def append_only(view: KVView) -> KVView:
    """Mark a view as append-only."""
    return AppendOnlyPlaced(view) if isinstance(view, PlacedView) else AppendOnly(view)
