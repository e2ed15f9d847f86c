"""Views of passes of which nothing but the cache is wanted. Made by the pass graphs; see `kv_view.SilentView`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_core.layers.kv_view import PlacedView

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView


@dataclass(frozen=True, slots=True)
class Silent:
    """The view within, marked."""

    inner: KVView

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        return self.inner.attend(layer, query, key, value, scale)


@dataclass(frozen=True, slots=True)
class SilentPlaced:
    """The same of a PlacedView."""

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


def silent(view: KVView) -> KVView:
    """A view that says so."""
    return SilentPlaced(view) if isinstance(view, PlacedView) else Silent(view)
