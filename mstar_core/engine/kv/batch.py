"""Records of one step of a KV node: its decode batch, scheduled chunks and outputs.

Shared by the scheduler, the model runner and the CUDA graphs; holds no policy and imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.sampling.sampler import SamplingRows
from mstar_core.engine.upload import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.device import HostCopy
    from mstar_core.engine.kv.sequence import Branch, Firing
    from mstar_core.errors import MstarError


@dataclass(slots=True)
class DecodeBatch:
    """Sequences of resident loops, one token each. Rebuilt when membership changes.

    has_rules: some sequence truncates by top-k or min-p. reports: some loop emits other ports than its id.
    """

    branches: list[Branch]
    slots: np.ndarray
    keys: np.ndarray
    has_rules: bool
    reports: bool
    _plain: tuple[Tensor, SamplingRows] | None = None

    def only(self, index: int, slots: Slots) -> DecodeBatch:
        """Return the batch of one of its sequences."""
        return decode_batch([self.branches[index]], slots)

    def on_device(self, slots: Slots) -> tuple[Tensor, SamplingRows]:
        """Return slots (int64 [n]) and sampling parameters on the device, for an uncaptured step."""
        if self._plain is None:
            self._plain = upload(self.slots, slots.device), sampling_parameters(self.slots, slots)
        return self._plain


def decode_batch(branches: list[Branch], slots: Slots) -> DecodeBatch:
    """Build the decode batch of a set of looping branches."""
    rows = np.array([branch.slot for branch in branches], dtype=np.int64)
    return DecodeBatch(
        branches=branches,
        slots=rows,
        keys=slots.key[rows],
        has_rules=any(slots.sampling[row].top_k > 0 or slots.sampling[row].min_p > 0 for row in rows),
        reports=any(
            branch.job is not None and branch.job.loop is not None and branch.job.loop.emit for branch in branches
        ),
    )


def sampling_parameters(rows: np.ndarray, slots: Slots) -> SamplingRows:
    """Return the sampling parameters of these slots on the device, without waiting for the device."""
    made = SamplingRows.of([slots.sampling[row] for row in rows], torch.device("cpu"))
    if slots.device.type == "cpu":
        return made
    columns = {
        each.name: upload(value, slots.device)
        for each in fields(made)
        if isinstance(value := getattr(made, each.name), torch.Tensor)
    }
    return replace(made, **columns)  # type: ignore[arg-type]  # only its tensors are replaced


@dataclass(slots=True)
class Piece:
    """Part or all of one firing in this step. samples: an id is drawn from its last token.

    iterations: of its loop that the step has run, the firing's own included. ahead: of its loop, as many, that one
    replay may compute before the host has settled any.
    """

    branch: Branch
    firing: Firing
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
        """Tokens that pass the module: those of the piece, once for each iteration over the same ones."""
        return self.count * self.iterations // self.firing.iterations


@dataclass(slots=True)
class Part:
    """What one forward did. ids: int64 [decode rows + sampled pieces], None when nothing was sampled.

    place: cache index of the id that each decode row drew; left: its iterations left after this step.
    """

    decode: DecodeBatch | None
    pieces: list[Piece]
    place: np.ndarray
    left: np.ndarray
    ids: Tensor | None = None
    host_ids: HostCopy | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    failed: list[tuple[Branch, MstarError]] = field(default_factory=list)
