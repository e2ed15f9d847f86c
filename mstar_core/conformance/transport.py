"""In-memory tensor transport of the in-process runtime. Each tensor is a loan that must be released."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import InlineTensor, ShmTensor, TensorRef
from mstar_core.transport.dtypes import name_of
from mstar_core.transport.tensors import inline_array

if TYPE_CHECKING:
    from mstar_core.transport.dtypes import Array


@dataclass(slots=True)
class LoanLedger:
    """All loans of a runtime by (owner, slot). Slots are never reused, so a late release cannot end another loan."""

    arrays: dict[tuple[str, int], Array] = field(default_factory=dict)
    last: int = 0

    def live(self) -> Counter[str]:
        """Count the open loans by owner."""
        return Counter(owner for owner, _ in self.arrays)


class MemoryTransport:
    """A `TensorTransport` that copies into a ledger. Each process of a runtime has one."""

    def __init__(self, name: str, ledger: LoanLedger) -> None:
        self._name = name
        self._ledger = ledger
        self._sent_bytes = 0

    @property
    def endpoint(self) -> str:
        """Empty: peers read from the shared ledger."""
        return ""

    @property
    def live(self) -> int:
        """Number of open loans of this process."""
        return self._ledger.live()[self._name]

    @property
    def used_bytes(self) -> int:
        """Bytes in this process's open loans."""
        return sum(array.nbytes for (owner, _), array in self._ledger.arrays.items() if owner == self._name)

    @property
    def sent_bytes(self) -> int:
        """Total bytes of all tensors put so far."""
        return self._sent_bytes

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> ShmTensor:
        """Lend a copy, of whatever size."""
        self._ledger.last += 1
        self._sent_bytes += array.nbytes
        slot = self._ledger.last
        self._ledger.arrays[self._name, slot] = array.copy()
        return ShmTensor(
            dtype=name_of(array, dtype), shape=array.shape, owner=self._name, offset=0, size_bytes=array.nbytes,
            slot=slot, generation=1,
        )  # fmt: skip

    def get(self, ref: TensorRef) -> Array:
        """Return the elements. Raises TransportError if the loan has ended, since its memory may be reused."""
        if isinstance(ref, InlineTensor):
            return inline_array(ref)
        found = self._ledger.arrays.get((ref.owner, ref.slot))
        if found is None:
            raise TransportError("a tensor was read after its loan had ended", f"{ref.dtype}{list(ref.shape)}")
        return found.copy()  # the reader may use it after the release

    copy = get

    def release(self, slot: int, generation: int) -> bool:
        """Release a loan of this process."""
        return self._ledger.arrays.pop((self._name, slot), None) is not None

    def connect(self, peer: str, endpoint: str, incarnation: int) -> None:
        """Do nothing: all peers exist from the start."""

    def reclaim(self, peer: str, incarnation: int | None = None) -> int:
        """Return 0: processes of this runtime do not die."""
        return 0

    def close(self) -> None:
        """Do nothing: the runtime owns the ledger."""
