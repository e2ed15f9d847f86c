"""Weight files of a checkpoint folder: which there are, and whether they are complete. Standard library only.

Used by plugins before any worker starts. Tensors are not read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from mstar_core.config.regular_file import check_regular
from mstar_core.errors import WeightsError

INDEX: Final = "model.safetensors.index.json"
WHOLE: Final = "model.safetensors"
SEED: Final = "random_weights.json"
"""File of a folder with random weights in place of weight files: see `random_fill`."""

HEADER_LIMIT: Final = 100 << 20
"""Most bytes of the header of a safetensors file."""

TORCH_INDEX: Final = "pytorch_model.bin.index.json"
TORCH_WHOLE: Final = "pytorch_model.bin"


def weight_files(folder: Path, names: Sequence[str] = (INDEX, WHOLE)) -> list[Path]:
    """Return the weight files of a folder: those that an index lists, or one file; none with random weights.

    names: indexes and files to look for, in this order. Raises WeightsError if there is none, for an index without
    files, and for a listed file that is missing.
    """
    if (folder / SEED).is_file():
        return []
    for name in names:
        path = folder / name
        if path.is_file():
            return _indexed(path) if name.endswith(".index.json") else [path]
    places = [str(folder / name) for name in names]
    hint = "give --weights the folder of a checkpoint"
    raise WeightsError(
        f"{folder} contains no weights", f"looked for {', '.join(places)}", hint, file=places[-1], looked=places
    )


def checked_folder(folder: Path, read_config: Callable[[Path], object]) -> Path:
    """Check the config and the weight files of a checkpoint and return `folder`. Tensors are not read.

    read_config: reads the config of a folder, and raises WeightsError if it cannot. Raises WeightsError.
    """
    if not folder.is_dir():
        hint = "give --weights the folder of a checkpoint"
        raise WeightsError(f"{folder} is not a folder", hint=hint, file=str(folder))
    read_config(folder)
    for path in weight_files(folder):
        check_whole(path)
    return folder


def check_whole(path: Path) -> None:
    """Raise WeightsError if a weight file is missing, truncated or not of its format."""
    problem = damage(path)
    if problem:
        raise WeightsError(f"{path} is damaged", problem, "download this file again", file=str(path))


def damage(path: Path) -> str:
    """Return what is wrong with a weight file, or an empty text."""
    if not path.is_file():
        return "it is not a regular file" if path.exists() else "it is missing"
    return _safetensors_damage(path) if path.suffix == ".safetensors" else _archive_damage(path)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begins, and its header without the metadata.

    Raises OSError for anything but a regular file, ValueError for a header that is cut off, too large or not an object,
    RecursionError for one that nests too deep.
    """
    check_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if size < 8 or head > min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{size} bytes are too few for its header of {head}")
        header = json.loads(file.read(head))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return 8 + head, {name: entry for name, entry in header.items() if name != "__metadata__"}


def _safetensors_damage(path: Path) -> str:
    size = path.stat().st_size
    try:
        start, entries = read_header(path)
        whole = start + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        return f"its header cannot be read: {error}"
    return "" if whole == size else f"{size} bytes; expected from its header: {whole}"


def _archive_damage(path: Path) -> str:
    # torch.save writes a zip archive, whose directory is at the end: truncated files have none.
    if zipfile.is_zipfile(path):
        return ""
    return f"{path.stat().st_size} bytes; the file is truncated or not an archive of torch.save"


def _indexed(index: Path) -> list[Path]:
    try:
        named = sorted({str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} cannot be read", repr(error), "download it again", file=str(index)) from error
    if not named:
        raise WeightsError(f"{index} names no files", hint="download it again", file=str(index))
    files = [index.parent / name for name in named]
    for path in files:
        if not path.is_file():
            raise WeightsError(
                f"{path} is missing", f"{index.name} lists {len(files)} files", "download it again", file=str(path)
            )
    return files
