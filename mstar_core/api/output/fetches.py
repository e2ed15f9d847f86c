"""Tensors of workers on other hosts on their way to the api. Used by the link.

They end in any order. The numbers of outputs restore theirs, in the `OutputQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mstar_core.errors import TransportError
from mstar_core.messages.flow import TensorFreed
from mstar_core.messages.tensors import ShmTensor, TensorRef
from mstar_core.messages.wire import Sender
from mstar_core.transport.blobs.client import Fetch
from mstar_core.transport.dtypes import Array
from mstar_core.transport.shm import TensorTransport

if TYPE_CHECKING:
    Arrived = Callable[[Mapping[str, Array] | TransportError], None]
    """Takes the tensors of one message by name, or why one of them has not come."""


class Fetches:
    """Fetches of the api process. Owned by the link. Returns each loan once, whatever becomes of the tensor."""

    def __init__(self, tensors: TensorTransport, courier: Sender) -> None:
        self._tensors = tensors
        self._courier = courier

    def is_needed(self, refs: Mapping[str, TensorRef]) -> bool:
        """Return whether one of the tensors is on another host."""
        return any(map(self._tensors.is_remote, refs.values()))

    def begin(self, refs: Mapping[str, TensorRef], then: Arrived) -> None:
        """Fetch tensors of one owner, for which `is_needed` is true. then: called later, on the event loop.

        Small ones among them are part of the message.
        """
        arrays = {name: self._tensors.get(ref) for name, ref in refs.items() if not self._tensors.is_remote(ref)}
        missing = {name: ref for name, ref in refs.items() if isinstance(ref, ShmTensor) and name not in arrays}
        errors: list[TransportError] = []

        def ended(name: str, fetch: Fetch) -> None:
            ref = missing.pop(name)
            try:
                arrays[name] = fetch.result()
            except TransportError as error:
                errors.append(error)
            self._courier.send(ref.owner, TensorFreed(slots=[(ref.slot, ref.generation)]))
            if not missing:
                then(errors[0] if errors else arrays)

        for name, ref in list(missing.items()):
            self._tensors.fetch(ref, lambda fetch, name=name: ended(name, fetch))  # type: ignore[misc]
