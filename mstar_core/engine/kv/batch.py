"""Records of one step of a KV node: scheduled chunks, the decode batch, outputs, and the step in flight.

Shared by the scheduler, the model runner and the CUDA graphs; holds no policy and imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from mstar_core.engine.sampling.sampler import UploadedColumns
from mstar_core.engine.transfers import contiguous_runs, upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job, StepResult
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.kv.device_share import TimedStep
    from mstar_core.engine.kv.sequence import Branch, ForwardPass
    from mstar_core.engine.steps.attention import AttentionMetadata
    from mstar_core.engine.transfers import HostCopy
    from mstar_core.errors import MstarError


@dataclass(slots=True)
class ScheduledChunk:
    """Part or all of a forward pass of one branch, scheduled in this step.

    samples: an id is drawn from the last token; sampled_at: its index among the drawn ids. iterations: iterations of
    the loop that the step has computed, those of the pass included. ahead: the most iterations that one replay may
    compute before the host has processed the first.
    """

    branch: Branch
    forward: ForwardPass
    count: int
    job: Job | None
    wants: frozenset[str] = frozenset()
    samples: bool = False
    sampled_at: int = -1
    is_last: bool = False
    iterations: int = 1
    ahead: int = 1

    @property
    def computed(self) -> int:
        """Tokens that go through the module; those of a repeated pass count once per iteration."""
        return self.count * self.iterations // self.forward.iterations


def wanted_ports(chunks: Sequence[ScheduledChunk]) -> frozenset[str]:
    """Return the ports that some chunk wants."""
    return frozenset[str]().union(*(chunk.wants for chunk in chunks))


@dataclass(slots=True)
class DecodeBatch:
    """Branches in resident loops, one token each. Rebuilt when membership changes, else reused.

    reports: ports other than the id that loops emit; to_host: those that the engine copies to the host.
    adjusts: the sampling of one of them adjusts logits. random_states: of the sequences, see `LoopRows`; None until a
    step needs them.
    """

    branches: list[Branch]
    slots: np.ndarray
    keys: np.ndarray
    reports: frozenset[str]
    to_host: frozenset[str] = frozenset()
    adjusts: bool = False
    random_states: np.ndarray | None = None
    _device: tuple[Tensor, UploadedColumns] | None = None
    _parts: tuple[int, list[DecodeBatch]] = field(default_factory=lambda: (0, []))

    def only(self, index: int, slots: Slots) -> DecodeBatch:
        """Return the batch of one of its branches."""
        return decode_batch([self.branches[index]], slots)

    def split(self, size: int, slots: Slots) -> list[DecodeBatch]:
        """Return batches of up to `size` branches that together are this one, the same ones on each call."""
        if len(self.branches) <= size:
            return [self]
        if self._parts[0] != size:
            starts = range(0, len(self.branches), size)
            self._parts = size, [decode_batch(self.branches[start : start + size], slots) for start in starts]
        return self._parts[1]

    def on_device(self, slots: Slots) -> tuple[Tensor, UploadedColumns]:
        """Return slots (int64 [n]) and sampling parameters on the device, for an uncaptured step."""
        if self._device is None:
            self._device = upload(self.slots, slots.device), sampling_columns(self.slots, slots)
        return self._device


def decode_batch(branches: list[Branch], slots: Slots) -> DecodeBatch:
    """Build the decode batch of branches in resident loops."""
    indices = np.array([branch.slot for branch in branches], dtype=np.int64)
    loops = [branch.job.loop for branch in branches if branch.job is not None and branch.job.loop is not None]
    return DecodeBatch(
        branches=branches,
        slots=indices,
        keys=slots.key[indices],
        adjusts=bool(slots.adjusts[indices].any()),
        reports=frozenset[str]().union(*(loop.emit for loop in loops)),
        to_host=frozenset[str]().union(*(loop.host_emit for loop in loops)),
    )


def sampling_columns(indices: np.ndarray, slots: Slots) -> UploadedColumns:
    """Return the sampling parameters of these slots on the device."""
    return UploadedColumns.of([slots.sampling[slot] for slot in indices], slots.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Ids to draw in one forward. slots: int64 [n]. ends: int64 [n], rows of the hidden states; None for all of them.

    tracked: so many first slots keep their last id once they have stopped. device: slots and parameters on the device,
    where they are known.
    """

    slots: np.ndarray
    tracked: int = 0
    ends: np.ndarray | None = None
    device: tuple[Tensor, UploadedColumns] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForward:
    """An uncaptured forward of packed sequences, complete: what the leader and the followers of a group compute alike.

    stores_rows: whether the decode batch has values of its resident loop. decode_slots: its slots on the device.
    """

    attention: AttentionMetadata
    ports: dict[str, Tensor | list[Tensor]]
    positions: Tensor
    draws: Draws | None = None
    wants_logits: bool = False
    stores_rows: bool = False
    decode_slots: Tensor | None = None


@dataclass(slots=True)
class BatchOutput:
    """Output of one batched forward. ids: int64 [decode batch + sampled chunks], None if nothing was sampled.

    place: cache index of the id that each decode branch drew; left: its iterations left after this step.
    """

    decode: DecodeBatch | None
    chunks: list[ScheduledChunk]
    place: np.ndarray
    left: np.ndarray
    ids: Tensor | None = None
    host_ids: HostCopy | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    failed: list[tuple[Branch, MstarError]] = field(default_factory=list)


class HostTransfer(Protocol):
    """A copy to the host in progress, such as a HostCopy. pending: the host tensor."""

    @property
    def pending(self) -> Tensor: ...

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> Tensor: ...


@dataclass(slots=True)
class KVStep:
    """A step in flight. dropped: keys of decode branches whose ids no longer count. held: branches that wait for it.

    copies: outputs on their way to the host. A step without copies to the host is done once it is launched, or nearly
    over if it is timed.
    """

    batches: list[BatchOutput]
    result: StepResult
    started: float
    dropped: set[int] = field(default_factory=set)
    held: list[Branch] = field(default_factory=list)
    copies: list[HostTransfer] = field(default_factory=list)
    timed: TimedStep | None = None

    @property
    def is_done(self) -> bool:
        """Whether everything that the host reads of this step has arrived."""
        if self.timed is not None and not self.timed.is_nearly_over:
            return False
        ids = (out.host_ids for out in self.batches if out.host_ids is not None)
        return all(each.is_done for each in ids) and all(each.is_done for each in self.copies)

    def copy_to_host(
        self, ports: frozenset[str], streamed: frozenset[str], to_host: Callable[[Tensor], HostTransfer]
    ) -> None:
        """Start copying loop outputs to the host, behind the step. Contiguous outputs of one pass share a copy.

        ports: copied at the end of loops and for emitted iterations; streamed: for emitted iterations only.
        What a decode batch reports is copied as a whole, also for ports that its loops name in `host_emit`.
        """
        wanted = [(item.outputs, ports) for item in self.result.done]
        for out in self.batches:
            if out.decode is not None and out.outputs:
                self._copy_decode(out, out.decode.to_host | ports | streamed, to_host)
        wanted += [(item.outputs, ports | streamed) for item in self.result.emissions]
        for port in sorted(ports | streamed):
            owners = [outputs for outputs, names in wanted if port in names and port in outputs]
            for span, values in contiguous_runs([outputs[port] for outputs in owners]):
                self.copies.append(to_host(values))
                for outputs, value in zip(owners[span], self.copies[-1].pending, strict=True):
                    outputs[port] = value

    def _copy_decode(self, out: BatchOutput, ports: frozenset[str], to_host: Callable[[Tensor], HostTransfer]) -> None:
        """Start copying what a decode batch reports, one copy per port."""
        for port in sorted(ports & out.outputs.keys()):
            self.copies.append(to_host(out.outputs[port]))
            out.outputs[port] = self.copies[-1].pending


def chunk_positions(forward: ForwardPass, count: int) -> Tensor:
    """Return the positions of the next `count` tokens of a pass: [count] on the host, or as its port gave them.

    int64, or float32 at a node with float positions.
    """
    if forward.given is not None:
        return forward.given.narrow(-1, forward.done, count)
    dtype = torch.float32 if isinstance(forward.position, float) else torch.int64
    if forward.attend.positions == "shared":
        if forward.iterations > 1:
            each = torch.arange(forward.iterations, dtype=dtype) + forward.position
            return each.repeat_interleave(forward.row_tokens)
        return torch.full((count,), forward.position, dtype=dtype)
    if dtype is torch.float32:
        return torch.from_numpy(np.float32(forward.position + forward.done + np.arange(count)))
    start = int(forward.position) + forward.done
    return torch.arange(start, start + count, dtype=torch.int64)


def pass_positions(forwards: Sequence[ForwardPass]) -> np.ndarray:
    """Return the positions of all tokens of whole passes without given positions: int64 [tokens]."""
    if all(forward.attend.positions == "shared" and forward.iterations == 1 for forward in forwards):
        return np.repeat(np.array([forward.position for forward in forwards]), [forward.tokens for forward in forwards])
    found = [_positions(forward) for forward in forwards]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _positions(forward: ForwardPass) -> np.ndarray:
    # By numpy: torch takes several times as long for an arange this short.
    numbers: np.ndarray = np.arange(forward.position, forward.next_position, dtype=np.int64)
    return np.repeat(numbers, forward.row_tokens) if forward.attend.positions == "shared" else numbers
