"""Files of weights: safetensors, whose header says where each tensor lies, and weights-only torch files.

Read by `weights.py` (tensor by tensor) and `upload.py` (bytes on their way to a GPU).
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mstar_core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS: Final = ".safetensors"
_HEADER_LIMIT: Final = 100_000_000

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes of safetensors files that this runtime reads, by the name in the header."""


class TensorReader(Protocol):
    """Gives tensors of one open file by name."""

    def get_tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor lies in a safetensors file. offset, size: bytes, offset from the start of the file."""

    name: str
    path: Path
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(path: Path) -> list[Stored]:
    """Every tensor of a safetensors file, in file order. Raises WeightsError for a damaged file or unknown dtype."""
    start, entries = _safetensors_header(path)
    found = []
    for name, entry in entries.items():
        try:
            begin, end = map(int, entry["data_offsets"])
            dtype, shape = DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{path}: the header is wrong about {name}", repr(error), file=str(path)) from error
        size = end - begin
        if dtype is None:
            detail = f"read are {', '.join(DTYPES)}"
            raise WeightsError(f"{path}: {name} is {entry['dtype']}", detail, file=str(path))
        if size != torch.Size(shape).numel() * dtype.itemsize:
            detail = f"{list(shape)} of {entry['dtype']} in {size} bytes"
            raise WeightsError(f"{path}: the header contradicts itself about {name}", detail, file=str(path))
        found.append(Stored(name=name, path=path, offset=start + begin, size=size, shape=shape, dtype=dtype))
    return sorted(found, key=lambda tensor: tensor.offset)


def in_file_order(path: Path, names: set[str]) -> list[str]:
    """These names as their tensors lie in the file, which the page cache reads ahead; torch files by name."""
    if path.suffix != SAFETENSORS:
        return sorted(names)
    _, entries = _safetensors_header(path)
    return sorted(names & set(entries), key=lambda name: (int(entries[name]["data_offsets"][0]), name))


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a file, which is checked for being whole."""
    if path.suffix != SAFETENSORS:
        return sorted(_read_torch(path))
    return sorted(_safetensors_header(path)[1])


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorReader]:
    """Open one file for reading tensors. Raises WeightsError when it is damaged."""
    if path.suffix != SAFETENSORS:
        yield _Loaded(path, _read_torch(path))
        return
    _safetensors_header(path)
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch it again", file=str(path)) from error


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Tensors of a torch file, which can only be read whole."""

    path: Path
    values: Mapping[str, Tensor]

    def get_tensor(self, name: str) -> Tensor:
        """The tensor called `name`."""
        if name not in self.values:
            raise WeightsError(f"{self.path} lacks {name}", "its index names it", "fetch it again", file=str(self.path))
        return self.values[name]


def _safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the tensor entries. Raises WeightsError unless the file is as long as it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size, _HEADER_LIMIT):
                raise WeightsError(
                    f"{path} is cut short or no safetensors file", f"{size} bytes", "fetch it again", file=str(path)
                )
            header = json.loads(file.read(length))
        entries = {str(name): entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} cannot be read", repr(error), "fetch it again", file=str(path)) from error
    if size != 8 + length + end:
        raise WeightsError(
            f"{path} is cut short" if size < 8 + length + end else f"{path} is longer than its header says",
            f"{size} bytes, its header asks for {8 + length + end}",
            "fetch it again",
            file=str(path),
        )
    return 8 + length, entries


def _read_torch(path: Path) -> Mapping[str, Tensor]:
    """Tensors of a `.bin` or `.pt` file; nothing but tensors is ever built from it."""
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can fail in any way
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read", detail, "fetch it again, or use safetensors", file=str(path)
        ) from error
    if not isinstance(values, dict) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise WeightsError(f"{path} holds other things than tensors", type(values).__name__, file=str(path))
    return values
