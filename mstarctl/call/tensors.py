"""One safetensors file of all arrays of an answer. Filled by the sink, written when the sink is closed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from mstar_core.codec import DTYPES, RawArray, safetensors_header
from mstar_core.errors import ConfigError

PER_OUTPUT: Final = frozenset({"name", "shape", "dtype", "format", "step", "part", "parts"})
"""Metadata of single outputs, which is not repeated for the file."""


@dataclass(slots=True)
class TensorFile:
    """Tensors by name, in order of arrival. Outputs of one name, such as the steps of a rollout, become one tensor.

    Outputs of equal shape are stacked on a new first axis. Outputs of different shapes are numbered: NAME.0, NAME.1.
    """

    arrays: dict[str, list[RawArray]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, data: bytes, facts: Mapping[str, Any]) -> None:
        """Add one output. Raises ConfigError if it is not a plain array."""
        dtype, shape, form = str(facts.get("dtype")), facts.get("shape"), facts.get("format", "raw")
        if shape is None or dtype not in DTYPES or not DTYPES[dtype].safetensors or form != "raw":
            raise ConfigError(
                f"{facts.get('name', 'this output')} cannot be stored in a safetensors file",
                f"dtype {dtype}, format {form}",
                "leave output_format out; mstarctl writes the file itself",
                key="out",
            )
        array = RawArray(data, tuple(int(side) for side in shape), dtype)
        self.arrays.setdefault(str(facts.get("name") or "output"), []).append(array)
        for name, value in facts.items():
            if name not in PER_OUTPUT:
                self.notes[name] = value if isinstance(value, str) else json.dumps(value)

    def write(self, file: BinaryIO) -> None:
        """Write the file, tensor by tensor."""
        parts = [part for name, arrays in self.arrays.items() for part in _tensors(name, arrays)]
        entries = [
            (name, arrays[0].dtype, shape, sum(len(array.data) for array in arrays)) for name, shape, arrays in parts
        ]
        file.write(safetensors_header(entries, self.notes))
        for _, _, arrays in parts:
            for array in arrays:
                file.write(array.data)


def _tensors(name: str, arrays: Sequence[RawArray]) -> list[tuple[str, tuple[int, ...], Sequence[RawArray]]]:
    """Return outputs of one name as tensors: name, shape, and the arrays that are concatenated into it."""
    if len(arrays) == 1:
        return [(name, arrays[0].shape, arrays)]
    if all((array.shape, array.dtype) == (arrays[0].shape, arrays[0].dtype) for array in arrays):
        return [(name, (len(arrays), *arrays[0].shape), arrays)]
    return [(f"{name}.{number}", array.shape, [array]) for number, array in enumerate(arrays)]
