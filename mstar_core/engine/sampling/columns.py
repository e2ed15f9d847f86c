"""Sampling parameters as arrays with one entry per sequence: the one encoding for uncaptured and captured draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.transfers import upload
from mstar_core.graph.declare.sampling import COLUMNS, Column, TextSampling
from mstar_core.layers import rng

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.declare.sampling import SamplingParams

_TABLE: Final[tuple[tuple[attrgetter[Any], str, Column], ...]] = tuple(
    (attrgetter(item.name), name, column)
    for item in dataclasses.fields(TextSampling)
    for name, column in item.metadata[COLUMNS].items()
)
"""Getter of the parameter, name and column of all columns, in the order of the parameters."""

_ADJUSTING: Final = next(name for _, name, column in _TABLE if column.adjusts)


def fields(count: int, *, adjusting: bool = False) -> dict[str, tuple[torch.dtype, int]]:
    """Return the staging fields of the columns of `count` draws. adjusting: those that adjust logits too."""
    return {name: (getattr(torch, column.dtype), count * column.width) for _, name, column in _columns(adjusting)}


def columns(params: Sequence[SamplingParams], count: int, *, adjusting: bool = False) -> dict[str, np.ndarray]:
    """Return the columns of `count` draws: [count], or [count, width] of a column of several numbers.

    params: of the first draws. The others are padding: greedy, with every other parameter off.
    """
    arrays = {}
    for parameter, name, column in _columns(adjusting):
        values = list(map(parameter, params))
        if column.width == 1:
            array = np.full(count, column.off, dtype=column.dtype)
            encoded = np.array(values)
            array[: len(values)] = encoded if column.encode is None else column.encode(encoded)
        else:
            assert column.encode is not None, "a value of several numbers has a way to write them"
            array = np.full((count, column.width), column.off, dtype=column.dtype)
            for line, numbers in zip(array, map(column.encode, values), strict=False):
                line[: len(numbers)] = numbers
        arrays[name] = array
    return arrays


def states(params: Sequence[SamplingParams]) -> np.ndarray:
    """Return the random states of draws: int64 [n], for `rng.uniform_host`."""
    return rng.seeded(np.array([rng.to_int64(each.seed) for each in params], dtype=np.int64))


def adjusts(columns: Collection[str]) -> bool:
    """Return whether columns have those that adjust logits."""
    return _ADJUSTING in columns


@dataclass(frozen=True, slots=True)
class UploadedColumns:
    """The columns of one batch on the device, made once per change of membership.

    states: int64 [n], on the host. is_greedy: no draw needs a random number. penalises: a repetition penalty is on.
    """

    columns: dict[str, Tensor]
    states: np.ndarray
    is_greedy: bool
    penalises: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> UploadedColumns:
        """Encode and upload parameters, without waiting for the device."""
        arrays = columns(params, len(params), adjusting=any(each.adjusts for each in params))
        return cls(
            {name: upload(array, device) for name, array in arrays.items()},
            states(params),
            is_greedy=all(each.temperature <= 0 for each in params),
            penalises=any(each.repetition_penalty != 1 for each in params),
        )

    def chance(self, counter: np.ndarray) -> np.ndarray:
        """Return the points of the next draws: float64 [n]. counter: int64 [n], ids drawn before."""
        return np.zeros(len(counter)) if self.is_greedy else rng.uniform_host(self.states, counter)


def _columns(adjusting: bool) -> Iterator[tuple[attrgetter[Any], str, Column]]:
    return (entry for entry in _TABLE if adjusting or not entry[2].adjusts)
