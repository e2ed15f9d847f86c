"""Checks of a checkpoint folder before anything reads it. Standard library only. Called by the planner of `up`.

A folder of unknown origin may contain pipes and devices, on which a reader would block, and small files that make a
reader use much memory. Damaged weights are reported by the process that reads them.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.files import read_header

MOST_FILES: Final = 100_000
JSON_BYTES: Final = 64 << 20
CONFIG_BYTES: Final = 1 << 20
"""Size of a JSON file up to which its numbers are checked: configurations, but not tokenizers."""

MOST: Final = {
    "layers": 4096,
    "heads": 65_536,
    "experts": 65_536,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
}
"""Largest values, by the end of the key: far beyond any model, and small enough to build without weights."""

HINT: Final = "give --weights the folder of a checkpoint from a source that you trust"


def check_folder(folder: Path) -> None:
    """Raise WeightsError for the first file of a folder that no reader should open."""
    for number, path in enumerate(folder.rglob("*")):
        if number >= MOST_FILES:
            raise _error(folder, f"it contains more than {MOST_FILES} files")
        try:
            facts = path.stat()
        except OSError:  # a dangling link; a reader that needs the file reports it
            continue
        if stat.S_ISDIR(facts.st_mode):
            continue
        if not stat.S_ISREG(facts.st_mode):
            raise _error(path, "it is a pipe, a socket or a device, not a regular file")
        if path.suffix == ".json":
            _check_json(path, facts.st_size)
        elif path.suffix == ".safetensors":
            _check_header(path)


def _check_header(path: Path) -> None:
    try:
        read_header(path)
    except RecursionError as error:
        raise _error(path, "its header nests too deep") from error
    except (OSError, ValueError):  # the process that reads the weights reports a damaged file
        return


def _check_json(path: Path, size: int) -> None:
    if size > JSON_BYTES:
        raise _error(path, f"{size} bytes; at most {JSON_BYTES}")
    if size > CONFIG_BYTES:
        return
    try:
        numbers = list(_numbers(json.loads(path.read_bytes())))
    except RecursionError as error:
        raise _error(path, "it nests too deep") from error
    except (OSError, ValueError):  # the process that reads the configuration reports it
        return
    for key, number in numbers:
        limit = next((most for end, most in MOST.items() if key.endswith(end)), None)
        if limit is not None and not -limit <= number <= limit:
            raise _error(path, f"{key} is {number:.15g}, at most {limit}")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def _error(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} cannot be part of a checkpoint", why, HINT, file=str(path), phase="plan")
