"""Arrays of an answer as one safetensors file, without NumPy. Filled by the sink, written when it is closed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from mstar_core.errors import ConfigError

TYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The format's own names. Source: its specification."""

ALIGNMENT: Final = 8
APART: Final = frozenset({"name", "shape", "dtype", "format", "step", "part", "parts"})
"""What is said of one output and not of the whole file."""


@dataclass(frozen=True, slots=True)
class _Array:
    data: bytes
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class TensorFile:
    """Tensors by name, in the order in which they came. Outputs of one name, such as steps, become one tensor.

    Of equal shapes they lie on a new first axis; of unlike shapes each keeps its own, numbered: NAME.0, NAME.1.
    """

    arrays: dict[str, list[_Array]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, data: bytes, facts: Mapping[str, Any]) -> None:
        """Take one output. Raises ConfigError for one that is no plain array."""
        dtype, shape = str(facts.get("dtype")), facts.get("shape")
        if shape is None or dtype not in TYPES or facts.get("format", "raw") != "raw":
            raise ConfigError(
                f"{facts.get('name', 'this output')} cannot be put into a safetensors file",
                f"dtype {dtype}, format {facts.get('format', 'raw')}",
                "leave output_format out: the file is made here",
                key="out",
            )
        made = _Array(data, tuple(int(side) for side in shape), dtype)
        self.arrays.setdefault(str(facts.get("name") or "output"), []).append(made)
        for name, value in facts.items():
            if name not in APART:
                self.notes[name] = value if isinstance(value, str) else json.dumps(value)

    def write(self, file: BinaryIO) -> None:
        """Write the file, tensor by tensor."""
        parts = [part for name, found in self.arrays.items() for part in _named(name, found)]
        header: dict[str, Any] = {"__metadata__": self.notes} if self.notes else {}
        end = 0
        for name, shape, found in parts:
            start, end = end, end + sum(len(each.data) for each in found)
            header[name] = {"dtype": TYPES[found[0].dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, found in parts:
            for each in found:
                file.write(each.data)


def _named(name: str, found: Sequence[_Array]) -> list[tuple[str, tuple[int, ...], Sequence[_Array]]]:
    """Outputs of one name as tensors: name, shape, and the arrays whose bytes follow each other in it."""
    if len(found) == 1:
        return [(name, found[0].shape, found)]
    if all((each.shape, each.dtype) == (found[0].shape, found[0].dtype) for each in found):
        return [(name, (len(found), *found[0].shape), found)]
    return [(f"{name}.{number}", each.shape, [each]) for number, each in enumerate(found)]
