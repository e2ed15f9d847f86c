"""Packed Triton kernels: what a start needs of Triton's cache, as one file that another machine installs.

A pack is a tar file, compressed with xz. Each of its folders is a key of Triton's cache: the hash of a kernel's source
and options, of Triton's code and of the GPU architecture. A machine with another Triton or GPU never looks for these
keys, so a pack that does not fit is harmless. Written by `scripts/triton_kernels.py`, installed by workers.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from mstar_core.errors import ConfigError

VARIABLE: Final = "MSTAR_KERNELS"
"""Environment variable that names packs, separated by colons. Workers install them before they compile a kernel."""

MOST_BYTES: Final = 256 << 20
"""Limit of the unpacked size."""

_KEPT: Final = (".cubin", ".json", ".so")
"""Files that a launch reads. The compiler's intermediate texts are left out."""

_GROUP: Final = "__grp__"
"""Begin of the name of a file that lists the files of a kernel, with absolute paths."""

_KEY: Final = re.compile(r"^[A-Z2-7]{40,64}$")
_FILE: Final = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$")


def pack(cache: Path, out: Path) -> int:
    """Pack the kernels of Triton's cache folder. Returns their number. The same kernels give the same bytes."""
    keys = [path for path in sorted(cache.iterdir()) if path.is_dir() and _KEY.match(path.name)]
    count = 0
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for key in keys:
            files = [path for path in sorted(key.iterdir()) if path.is_file() and path.suffix in _KEPT]
            names = {path.name for path in files}
            for path in files:
                content = path.read_bytes()
                if path.name.startswith(_GROUP):
                    content = _group(content, lambda name: name, names)
                entry = tarfile.TarInfo(f"{key.name}/{path.name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            count += any(path.suffix == ".cubin" for path in files)
    return count


def install(file: Path, cache: Path) -> int:
    """Install a pack into Triton's cache folder. Returns the number of keys that were new.

    Raises ConfigError for a file that is not a pack.
    """
    cache.mkdir(parents=True, exist_ok=True)
    mark = cache / f".pack-{_digest(file)}"
    if mark.exists():
        return 0
    scratch = Path(tempfile.mkdtemp(prefix=".pack-", dir=cache))
    new = 0
    try:
        for key, name, content in _entries(file):
            (scratch / key).mkdir(exist_ok=True)
            (scratch / key / name).write_bytes(content)
        for folder in sorted(scratch.iterdir()):
            _root(folder, cache / folder.name)
            with suppress(OSError):  # another worker was faster, or the kernel was compiled here
                os.rename(folder, cache / folder.name)
                new += 1
        mark.touch()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return new


def install_named(cache: Path) -> int:
    """Install the packs that the environment names. Returns the number of keys that were new. Raises ConfigError."""
    packs = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    return sum(install(file, cache) for file in packs)


def _entries(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield key, name and content of each file. Raises ConfigError for anything else than such files."""
    total = 0
    try:
        with tarfile.open(file, "r:xz") as archive:
            for entry in archive:
                key, _, name = entry.name.partition("/")
                total += entry.size
                if not entry.isfile() or not _KEY.match(key) or not _FILE.match(name) or total > MOST_BYTES:
                    raise ConfigError(f"{file} is not a pack of kernels", f"it holds {entry.name!r}", key=VARIABLE)
                content = archive.extractfile(entry)
                assert content is not None, "a regular file has content"
                yield key, name, content.read()
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ConfigError(
            f"{file} cannot be read as a pack of kernels",
            f"{type(error).__name__}: {error}",
            f"name packs of this release in {VARIABLE}, or unset it",
            key=VARIABLE,
        ) from error


def _root(folder: Path, into: Path) -> None:
    """Give the groups of a folder the paths that they will have."""
    for path in folder.glob(f"{_GROUP}*"):
        names = {path.name for path in folder.iterdir()}
        path.write_bytes(_group(path.read_bytes(), lambda name: str(into / name), names))


def _group(content: bytes, place: Callable[[str], str], names: set[str]) -> bytes:
    """Return the content of a group with the files in `names` only, each at `place` of its name."""
    paths = json.loads(content)["child_paths"]
    return json.dumps({"child_paths": {name: place(name) for name in sorted(paths) if name in names}}).encode()


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read",
            f"{VARIABLE} names it: {error}",
            f"name a pack of kernels in {VARIABLE}, or unset it",
            key=VARIABLE,
        ) from error
