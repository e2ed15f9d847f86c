"""Reads weight files into a module's parameters: safetensors, or `.bin` read as weights only. Called by `model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from mstar_core.errors import WeightsError, did_you_mean
from mstar_orpheus.checkpoint import verify

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.plugin.model import WeightProgress


def names_in(files: Sequence[Path]) -> set[str]:
    """Names of all tensors, without reading safetensors' data."""
    return {name for path in files for name in _names(path)}


def read_state(files: Sequence[Path], progress: WeightProgress | None = None) -> dict[str, Tensor]:
    """Every tensor of some files, on the host. For small checkpoints."""
    return {name: tensor for name, tensor, _ in _tensors(files, progress)}


def load_into(
    targets: Mapping[str, Tensor],
    files: Sequence[Path],
    *,
    ignore: frozenset[str] = frozenset(),
    progress: WeightProgress | None = None,
) -> None:
    """Copy every tensor of the files into the target of its name, casting to the target's dtype.

    targets: published name -> parameter, or a view of one. ignore: names that have no target and need none.
    Raises WeightsError for a name without target, a wrong shape, or a target that no file fills.
    """
    filled: set[str] = set()
    for name, tensor, path in _tensors(files, progress):
        target = targets.get(name)
        if target is None and name in ignore:
            continue
        if target is None:
            raise WeightsError(
                f"{path} holds {name}, which the model has no place for",
                hint=did_you_mean(name, targets),
                file=str(path),
            )
        check_shape(name, tensor.shape, target, path)
        with torch.no_grad():
            target.copy_(tensor)
        filled.add(name)
    missing = sorted(set(targets) - filled)
    if missing:
        detail = f"{len(missing)} of {len(targets)} tensors are missing; read {', '.join(path.name for path in files)}"
        raise WeightsError(
            f"{files[0].parent} lacks {missing[0]}", detail, "fetch the checkpoint again", file=str(files[0].parent)
        )


def check_shape(name: str, shape: Sequence[int], target: Tensor, path: Path) -> None:
    """Raise WeightsError when a file's tensor does not fit its place."""
    if tuple(shape) != tuple(target.shape):
        detail = f"the config asks for {list(target.shape)}"
        raise WeightsError(
            f"{path}: {name} has shape {list(shape)}",
            detail,
            "config and weights must be of one checkpoint",
            file=str(path),
        )


def _names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_pickled(path))
    verify(path)
    with _opened(path) as file:
        return list(file.keys())


def _tensors(files: Sequence[Path], progress: WeightProgress | None) -> Iterator[tuple[str, Tensor, Path]]:
    total = sum(path.stat().st_size for path in files)
    done = 0
    for path in files:
        for name, tensor in _file_tensors(path):
            yield name, tensor, path
            done += tensor.numel() * tensor.element_size()
            if progress is not None:
                progress(min(done, total), total, path.name)
    if progress is not None and files:
        progress(total, total, files[-1].name)


def _file_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    verify(path)
    if path.suffix != ".safetensors":
        yield from _pickled(path).items()
        return
    with _opened(path) as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch this file again", file=str(path)) from error


def _pickled(path: Path) -> dict[str, Tensor]:
    verify(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read as weights", reason, "fetch this file again", file=str(path)
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise WeightsError(f"{path} holds no table of tensors", hint="fetch this file again", file=str(path))
    return state
