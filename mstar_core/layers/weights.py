"""Reads published checkpoints into modules: safetensors (one file or a sharded index), or weights-only torch files.

Called by plugins while a worker starts. Files are mapped, so only the tensors that are asked for are read.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mstar_core.errors import WeightsError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

Progress = Callable[[int, int, str], None]
"""Called with (bytes read so far, total bytes, file name)."""

INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")
SAFETENSORS: Final = ".safetensors"
_HEADER_LIMIT: Final = 100_000_000


class TensorReader(Protocol):
    """Gives tensors of one open file by name."""

    def get_tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the host."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which file holds which tensor. Made by `find` or `of_files`; holds no tensors."""

    folder: Path
    file_of: Mapping[str, Path]

    @classmethod
    def find(cls, folder: Path) -> Checkpoint:
        """Look for an index, then for a single file, then for any safetensors file in a folder.

        Raises WeightsError naming what was looked for, or the first shard that is missing or cut short.
        """
        if not folder.is_dir():
            raise WeightsError(f"there is no folder {folder}", hint="give the folder of a checkpoint", file=str(folder))
        for name in INDEXES:
            if (folder / name).is_file():
                return cls(folder, _read_index(folder / name))
        for name in SINGLE_FILES:
            if (folder / name).is_file():
                return cls.of_files([folder / name])
        loose = sorted(folder.glob(f"*{SAFETENSORS}"))
        if loose:
            return cls.of_files(loose)
        looked = [*INDEXES, *SINGLE_FILES, f"*{SAFETENSORS}"]
        raise WeightsError(
            f"{folder} holds no weights", f"looked for {', '.join(looked)}", file=str(folder), looked=looked
        )

    @classmethod
    def of_files(cls, files: Iterable[Path]) -> Checkpoint:
        """All tensors of these files. Raises WeightsError for a damaged file or a tensor that two files hold."""
        file_of: dict[str, Path] = {}
        folder = Path()
        for path in files:
            folder = path.parent
            for name in tensor_names(path):
                if name in file_of:
                    raise WeightsError(f"{name} is in two files", f"{file_of[name]} and {path}", file=str(path))
                file_of[name] = path
        return cls(folder, file_of)

    def files(self) -> list[Path]:
        """The files that hold tensors, in name order."""
        return sorted(set(self.file_of.values()))

    def tensors(
        self, names: Iterable[str] | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one by one, file by file. Raises WeightsError for a name that is not there or cannot be read."""
        wanted = set(self.file_of) if names is None else set(names)
        unknown = sorted(wanted - set(self.file_of))
        if unknown:
            raise WeightsError(
                f"{self.folder} lacks {unknown[0]}",
                f"{len(unknown)} tensors are missing",
                did_you_mean(unknown[0], self.file_of),
                file=str(self.folder),
            )
        total = sum(path.stat().st_size for path in self.files())
        before = 0
        for path in self.files():
            read = 0
            with open_tensors(path) as reader:
                for name in sorted(name for name in wanted if self.file_of[name] == path):
                    value = reader.get_tensor(name)
                    read += value.numel() * value.element_size()
                    yield name, value
                    if progress is not None:
                        progress(min(before + read, total), total, path.name)
            before += path.stat().st_size
            if progress is not None:
                progress(before, total, path.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """How names of a checkpoint become names of a module. The first prefix that fits is replaced.

    prefixes: checkpoint prefix -> module prefix. ignore: prefixes of tensors that are left out on purpose.
    optional: module names that may stay as they were made.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()

    def target(self, name: str) -> str | None:
        """The module's name of a checkpoint tensor; None when it is left out."""
        if name.startswith(self.ignore) and self.ignore:
            return None
        for prefix, replacement in self.prefixes.items():
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name


def load_weights(
    module: nn.Module, checkpoint: Checkpoint, names: NameMap | None = None, progress: Progress | None = None
) -> None:
    """Fill a module's parameters and persistent buffers, casting to the dtype that each has.

    Every tensor must find its place and every place its tensor. Raises WeightsError naming file and key otherwise,
    before anything was changed unless a file breaks off in the middle.
    """
    names = names or NameMap()
    places = module.state_dict(keep_vars=True)
    source_of: dict[str, str] = {}
    for name in checkpoint.file_of:
        target = names.target(name)
        if target is None:
            continue
        if target not in places:
            raise WeightsError(
                f"{checkpoint.file_of[name]} holds {name}, which has no place in the model",
                f"it would be {target}",
                did_you_mean(target, places),
                file=str(checkpoint.file_of[name]),
            )
        source_of[target] = name
    missing = sorted(set(places) - set(source_of) - names.optional)
    if missing:
        raise WeightsError(
            f"{checkpoint.folder} lacks {missing[0]}",
            f"{len(missing)} of {len(places)} tensors are missing",
            "the checkpoint is of another model or incomplete",
            file=str(checkpoint.folder),
        )
    target_of = {name: target for target, name in source_of.items()}
    with torch.no_grad():
        for name, value in checkpoint.tensors(target_of, progress):
            place = places[target_of[name]]
            if value.shape != place.shape:
                raise WeightsError(
                    f"{checkpoint.file_of[name]}: {name} has shape {list(value.shape)}",
                    f"the model has {list(place.shape)}",
                    "config and weights must be of one checkpoint",
                    file=str(checkpoint.file_of[name]),
                )
            place.copy_(value)


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a file, which is checked for being whole."""
    if path.suffix != SAFETENSORS:
        return sorted(_read_torch(path))
    return sorted(_safetensors_header(path))


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


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): path.parent / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no index of weights", repr(error), "fetch it again", file=str(path)) from error
    held: dict[Path, set[str]] = {}
    for name, file in file_of.items():
        if ".." in file.relative_to(path.parent).parts if file.is_relative_to(path.parent) else True:
            raise WeightsError(f"{path} names a file outside its folder", str(file), file=str(path))
        if file not in held:
            if not file.is_file():
                raise WeightsError(f"{file} is missing", f"{path.name} says that it holds {name}", file=str(file))
            held[file] = set(tensor_names(file)) if file.suffix == SAFETENSORS else {name for name in file_of}
        if name not in held[file]:
            raise WeightsError(f"{file} lacks {name}", f"{path.name} says that it is there", file=str(file))
    return file_of


def _safetensors_header(path: Path) -> dict[str, object]:
    """Tensor entries of a file's header. Raises WeightsError when the file is not exactly as long as it says."""
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
    return entries


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
