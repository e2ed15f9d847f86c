"""Records of one step: scheduled chunks, the decode batch, and the output of a forward.

Made by the scheduler and the model runner; the CUDA graphs read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.sampling.sampler import SamplingRows
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.kv.sequence import Branch, ForwardPass
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


@dataclass(slots=True)
class DecodeBatch:
    """Branches in resident loops, one token each. Rebuilt when membership changes, else reused.

    reports: ports other than the id that loops emit.
    """

    branches: list[Branch]
    slots: np.ndarray
    keys: np.ndarray
    reports: frozenset[str]
    _device: tuple[Tensor, SamplingRows] | None = None

    def only(self, index: int, slots: Slots) -> DecodeBatch:
        """Return the batch of one of the branches."""
        return decode_batch([self.branches[index]], slots)

    def on_device(self, slots: Slots) -> tuple[Tensor, SamplingRows]:
        """Return slots (int64 [n]) and sampling parameters on the device, for steps without a graph."""
        if self._device is None:
            self._device = upload(self.slots, slots.device), sampling_parameters(self.slots, slots)
        return self._device


def decode_batch(branches: list[Branch], slots: Slots) -> DecodeBatch:
    """Make the decode batch of branches in resident loops."""
    indices = np.array([branch.slot for branch in branches], dtype=np.int64)
    return DecodeBatch(
        branches=branches,
        slots=indices,
        keys=slots.key[indices],
        reports=frozenset[str]().union(
            *(branch.job.loop.emit for branch in branches if branch.job is not None and branch.job.loop is not None)
        ),
    )


def sampling_parameters(indices: np.ndarray, slots: Slots) -> SamplingRows:
    """Return the sampling parameters of these slots on the device, without a synchronisation."""
    made = SamplingRows.of([slots.sampling[slot] for slot in indices], torch.device("cpu"))
    if slots.device.type == "cpu":
        return made
    columns = {
        each.name: upload(value, slots.device)
        for each in fields(made)
        if isinstance(value := getattr(made, each.name), torch.Tensor)
    }
    return replace(made, **columns)  # type: ignore[arg-type]  # only its tensors are replaced


@dataclass(slots=True)
class BatchOutput:
    """The output of one batched forward. ids: int64 [decode batch + sampled chunks], None if nothing was sampled.

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


def chunk_positions(forward: ForwardPass, count: int) -> Tensor:
    """Return the positions of the next `count` tokens of a pass: int64 [count] on the host, or as its port has them."""
    if forward.given is not None:
        return forward.given.narrow(-1, forward.done, count)
    if forward.attend.positions == "shared":
        if forward.iterations > 1:
            return torch.arange(forward.position, forward.next_position).repeat_interleave(forward.row_tokens)
        return torch.full((count,), forward.position, dtype=torch.int64)
    start = forward.position + forward.done
    return torch.arange(start, start + count, dtype=torch.int64)


def pass_positions(forwards: Sequence[ForwardPass]) -> np.ndarray:
    """Return the positions of all tokens of whole passes without given positions: int64 [tokens]."""
    if all(forward.attend.positions == "shared" and forward.iterations == 1 for forward in forwards):
        return np.repeat(np.array([forward.position for forward in forwards]), [forward.tokens for forward in forwards])
    found = [_positions(forward) for forward in forwards]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _positions(forward: ForwardPass) -> np.ndarray:
    # numpy: torch takes several times as long for an arange this short.
    numbers: np.ndarray = np.arange(forward.position, forward.next_position, dtype=np.int64)
    return np.repeat(numbers, forward.row_tokens) if forward.attend.positions == "shared" else numbers
