"""Reads published checkpoints into modules: safetensors (one file or a sharded index), or weights-only torch files.

Called by plugins while a worker starts. For a GPU, bytes go from the file straight to their tensors (`upload.py`);
on the CPU files are mapped, so only the tensors that are asked for are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import WeightsError, did_you_mean
from mstar_core.weights.files import SAFETENSORS, in_file_order, open_tensors, stored_tensors, tensor_names
from mstar_core.weights.upload import Target, upload

if TYPE_CHECKING:
    from torch import Tensor, nn

Progress = Callable[[int, int, str], None]
"""Called with (bytes read so far, total bytes, file name)."""

INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")


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
                for name in in_file_order(path, {name for name in wanted if self.file_of[name] == path}):
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
    target_of = {name: places[target] for target, name in source_of.items()}
    if _goes_straight(checkpoint, target_of):
        _upload(checkpoint, target_of, progress)
        return
    with torch.no_grad():
        for name, value in checkpoint.tensors(target_of, progress):
            _check_shape(checkpoint, name, value.shape, target_of[name])
            target_of[name].copy_(value)


def _goes_straight(checkpoint: Checkpoint, places: Mapping[str, Tensor]) -> bool:
    """Whether everything goes to one GPU from files that say where each tensor lies."""
    devices = {place.device for place in places.values()}
    are_plain = all(checkpoint.file_of[name].suffix == SAFETENSORS for name in places)
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and are_plain


def _upload(checkpoint: Checkpoint, places: Mapping[str, Tensor], progress: Progress | None) -> None:
    stored = [tensor for path in checkpoint.files() for tensor in stored_tensors(path) if tensor.name in places]
    for tensor in stored:
        _check_shape(checkpoint, tensor.name, torch.Size(tensor.shape), places[tensor.name])
    total = sum(path.stat().st_size for path in checkpoint.files())

    def report(read: int, path: Path) -> None:
        if progress is not None:
            progress(min(read, total), total, path.name)

    upload([Target(stored=tensor, place=places[tensor.name]) for tensor in stored], report)
    report(total, checkpoint.files()[-1])


def _check_shape(checkpoint: Checkpoint, name: str, shape: torch.Size, place: Tensor) -> None:
    if shape != place.shape:
        raise WeightsError(
            f"{checkpoint.file_of[name]}: {name} has shape {list(shape)}",
            f"the model has {list(place.shape)}",
            "config and weights must be of one checkpoint",
            file=str(checkpoint.file_of[name]),
        )


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
