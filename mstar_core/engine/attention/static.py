"""Attention in static shapes, as captured steps need it: the contract of its kernels, and its buffers.

The host fills arrays, and a captured graph reads them. Decode, prefill, loop passes and prefixes are shapes of one
contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from mstar_core.engine.attention.staging import Staging

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

LOG2E: Final = 1.4426950408889634
"""Factor of a scale in kernels that use powers of two instead of powers of e."""


class StaticAttention(ABC):
    """Kernels of one bucket, and the KVView that modules attend with. Made once per captured graph.

    The sequences of a pass may be one sequence at several lengths, such as consecutive frames. In each layer all append
    before any attends, and no kernel may read cache pages before that, even pages with earlier tokens. A kernel may
    read them as it starts if nothing is appended, and in a bucket of one sequence: between two passes of one replay the
    module has a kernel that starts after all earlier ones have ended.
    """

    plans: int = 0
    """Plans made after the first one. Most kernels need no plan."""

    memory: StaticAttention | None = None
    """Attention over the memories of a decode bucket, None at a node without memory."""

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        self._pools = pools
        self._page_size = page_size
        self._shape = shape
        self._device: Mapping[str, Tensor] = {}

    @property
    @abstractmethod
    def fields(self) -> Fields:
        """Arrays that the kernels read on the device. The last one may be filled in part."""

    @abstractmethod
    def values(self, metadata: AttentionMetadata) -> Values:
        """Return the fields for the next replay. Fields that did not change may be left out from the end."""

    def following(self) -> Values | None:
        """Return the fields for the token after the one that each sequence of the last `values` has appended.

        None if they have to be computed anew, for instance because a page is full. Decode steps of one launch use it.
        """
        return None

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See MemoryView."""
        assert self.memory is not None, "the node declares no memory"
        return self.memory.read(layer, query, scale)

    def read(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """Attend over the cache without appending, from the last token of each sequence.

        Raises TypeError: attention of decode steps replaces it, and no other captured step reads a memory.
        """
        raise TypeError(f"{type(self).__name__} cannot read a memory; attention of decode steps can")

    def bind(self, device: Mapping[str, Tensor]) -> Self:
        """Set the fields on the device, which stay in the same memory. Returns this object."""
        self._device = device
        return self

    def plan(self) -> None:  # noqa: B027 a subclass may need none
        """Plan the kernels for the values sent last."""

    def reset(self) -> None:  # noqa: B027 a subclass may keep nothing
        """Drop what is kept between the layers of a step. Called around a step, within its capture."""


class AttentionBuffers:
    """Static buffers of one attention and of everything else that its step reads of the host; one copy per replay."""

    def __init__(
        self,
        attention: StaticAttention,
        device: torch.device,
        beside: Fields | None = None,
        memory: StaticAttention | None = None,
    ) -> None:
        """beside: fields of the step. memory: decode attention over memories, which have buffers of their own."""
        self.attention = attention
        attention.memory = memory
        self._memory = AttentionBuffers(memory, device) if memory is not None else None
        self._staging = Staging({**(beside or {}), **attention.fields}, device)
        self.device = self._staging.device
        self.view: Any = attention.bind(self.device)

    def reset(self) -> None:
        """Drop what the attention keeps between the layers of a step. Called before and after a step."""
        self.attention.reset()

    def prepare_memory(self, metadata: AttentionMetadata) -> None:
        """Fill the buffers of the memories, which stay as they are until another batch replaces this one."""
        if self._memory is not None:
            self._memory.prepare(metadata.of_memory())

    def prepare(self, metadata: AttentionMetadata, beside: Values | None = None, *, more: bool = False) -> None:
        """Fill the buffers for the next replay. Earlier replays may still wait on the device.

        more: a `prepare_next` follows at once.
        """
        self._staging.put({**(beside or {}), **self.attention.values(metadata)}, more=more)
        self.attention.plan()

    def prepare_next(self, metadata: Callable[[], AttentionMetadata], beside: Values, *, more: bool) -> None:
        """Fill the buffers for the token of each sequence that follows the last one.

        metadata: of that token; read only where the fields do not follow from the last ones.
        """
        values = self.attention.following()
        if values is None:
            self.prepare(metadata(), beside, more=more)
        else:
            self._staging.put({**beside, **values}, more=more)
