"""Attention in static shapes, as captured steps need it: the contract of its kernels, and its buffers.

The host fills arrays, and a captured graph reads them. Decode, prefill, loop passes and prefixes are shapes of one
contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from mstar_core.engine.attention.staging import Staging

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

LOG2E: Final = 1.4426950408889634
"""Factor of a scale in kernels that use powers of two instead of powers of e."""


class StaticAttention(Protocol):
    """Kernels of one bucket. Made once per captured graph by `AttentionBackend.static`.

    The sequences of a pass may be one sequence at several lengths, such as consecutive frames. In each layer all append
    before any attends, and no kernel may read cache pages before that, even pages with earlier tokens. A kernel may
    read them as it starts if nothing is appended, and in a bucket of one sequence: between two passes of one replay the
    module has a kernel that starts after all earlier ones have ended.
    """

    plans: int
    """Plans made after the first one."""

    @property
    def fields(self) -> Fields:
        """Arrays that the kernels read on the device. The last one may be filled in part."""

    def view(self, device: Mapping[str, Tensor]) -> Any:
        """Return the KVView that the module attends with. device: the fields, always in the same memory."""

    def values(self, metadata: AttentionMetadata) -> Values:
        """Return the fields for the next replay. Fields that did not change may be left out from the end."""

    def plan(self) -> None:
        """Plan the kernels for the values sent last, if they need a plan."""

    def reset(self) -> None:
        """Drop what is kept between the layers of a step. Called around a step, within its capture."""


class PagedKernels:
    """Base of attention over pages; a subclass is also the view that modules attend with. Most need no plan."""

    plans: int = 0

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        self._pools = pools
        self._page_size = page_size
        self._shape = shape
        self._device: Mapping[str, Tensor] = {}

    def view(self, device: Mapping[str, Tensor]) -> Self:
        """See StaticAttention: this object."""
        self._device = device
        return self

    def plan(self) -> None:
        """See StaticAttention: nothing is planned."""

    def reset(self) -> None:
        """See StaticAttention: nothing is kept."""


class AttentionBuffers:
    """Static buffers of one attention and of everything else that its step reads of the host; one copy per replay.

    on_prepare: called with the metadata and the values of each replay, for the followers of a tensor-parallel group.
    """

    def __init__(self, attention: StaticAttention, device: torch.device, beside: Fields | None = None) -> None:
        """beside: fields of the step."""
        self.attention = attention
        self.on_prepare: Callable[[AttentionMetadata, Values], None] | None = None
        self._staging = Staging({**(beside or {}), **attention.fields}, device)
        self.device = self._staging.device
        self.view: Any = attention.view(self.device)

    def reset(self) -> None:
        """Drop what the attention keeps between the layers of a step. Called before and after a step."""
        self.attention.reset()

    def prepare(self, metadata: AttentionMetadata, beside: Values | None = None) -> None:
        """Fill the buffers for the next replay. Earlier replays may still wait on the device."""
        if self.on_prepare is not None:
            self.on_prepare(metadata, beside or {})
        self._staging.put({**(beside or {}), **self.attention.values(metadata)})
        self.attention.plan()
