"""Output of one launched step of a KV node: tensors on the device, and ids on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mstar_core.engine.transfers import HostCopy

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.errors import MstarError


@dataclass(frozen=True, slots=True)
class DrawnIds:
    """Ids that one forward drew: int64 [n] on the device, which a later step may overwrite, and their host copy."""

    ids: Tensor
    host: HostCopy

    @classmethod
    def of(cls, ids: Tensor) -> DrawnIds:
        """Start copying ids to the host. The next replay of any captured step overwrites those of a captured one."""
        return cls(ids, HostCopy(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """Output of a part of the decode batch: its sequences from `start` on, one per id.

    reports: values of the ports that loops emit, one per sequence; `to_host` copies replace them.
    """

    start: int
    count: int
    drawn: DrawnIds
    reports: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """Output of one pass. ports: its share of the wanted outputs. iterations: those of its loop that they end.

    later: outputs of further iterations, one each, that the same replay has computed. drawn, index: the ids of its
    forward and its place among them; None if it drew none.
    """

    ports: dict[str, Tensor]
    iterations: int = 1
    later: Sequence[dict[str, Tensor]] = ()
    drawn: DrawnIds | None = None
    index: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of a step. passes: as in the plan; None for one that failed. failed: slot -> error, decoding ones too.

    A failed sequence has changed nothing that others read; the rest of its batch was computed without it.
    """

    decode: Sequence[DecodeOutput] = ()
    passes: Sequence[PassOutput | None] = ()
    failed: Mapping[int, MstarError] = field(default_factory=dict)
