"""Inputs and saved states of runs in the memory of another host, fetched when the run comes.

Called by the executor. The lender is the api, which ends the loans with the request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.work import RunWalk, SignalRef
from mstar_core.worker.incoming.reads import TensorReads
from mstar_core.worker.state.request import WorkerRequest

if TYPE_CHECKING:
    from torch import Tensor


def lent_to(message: RunWalk, names: Collection[str] | None = None) -> Iterator[TensorRef]:
    """Yield the tensors that are lent to a run: its inputs, all or those of `names`, and the states of its loops."""
    for name, ref in message.inputs.items():
        if not isinstance(ref, SignalRef) and (names is None or name in names):
            yield ref
    for state in message.saved.values():
        yield from state.values.values()


class RunInputs:
    """Runs that wait for inputs. Owned by the executor; a request owns its tensors on the way."""

    def __init__(self, reads: TensorReads) -> None:
        self._reads = reads
        self._waiting: dict[tuple[int, str], WorkerRequest] = {}

    @property
    def waiting(self) -> int:
        """Number of runs that wait."""
        return len(self._waiting)

    def begin(self, request: WorkerRequest, message: RunWalk, names: Collection[str]) -> None:
        """Begin to read what is elsewhere. names: of the inputs that this rank uses.

        Raises TransportError if the lender is gone.
        """
        for ref in lent_to(message, names):
            if self._reads.reads(ref):
                self._reads.begin(ref)
                request.fetching.append(ref)

    def wait(self, request: WorkerRequest, partition: str, message: RunWalk) -> bool:
        """Return whether a run has to wait for inputs. Raises TransportError if one cannot be read."""
        if not request.fetching:
            return False
        lent = list(lent_to(message))
        refs = [ref for ref in request.fetching if ref in lent]
        if not all(map(self._reads.is_ready, refs)):
            self._waiting[request.handle, partition] = request
            return True
        for error in filter(None, map(self._reads.failure, refs)):
            raise error
        return False

    def take(self, request: WorkerRequest, ref: TensorRef) -> Tensor:
        """Return an input that was read for a run which begins now."""
        request.fetching.remove(ref)
        return self._reads.take(ref)

    def take_waiting(self) -> list[tuple[WorkerRequest, str]]:
        """Return the requests and partitions whose next run has waited, to be tried again."""
        waiting, self._waiting = self._waiting, {}
        return [(request, partition) for (_, partition), request in waiting.items()]

    def closed(self, request: WorkerRequest) -> None:
        """Drop what a request waits for."""
        for ref in request.fetching:
            self._reads.drop(ref)
        request.fetching.clear()
