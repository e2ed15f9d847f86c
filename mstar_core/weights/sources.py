"""Sources of checkpoint folders: the Hugging Face hub and its cache, linked folders, and generated checkpoints.

Used by plugins in the process that prepares the weights. Loads no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from mstar_core.errors import StartError, WeightsError

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

Received = Callable[[int], None]
"""Called with the number of newly received bytes."""

STAMP: Final = "tiny.json"
"""File with the name and version of a generated checkpoint."""


class WeightHub(Protocol):
    """Repository of official weights: `HuggingFace`, or a fake in tests."""

    @property
    def cache(self) -> Path:
        """Folder of the cache."""

    @property
    def is_offline(self) -> bool:
        """Whether downloads are disabled."""

    def cached(self, repo: str, file: str) -> Path | None:
        """Return the cached copy of a file, or None."""

    def files(self, repo: str) -> dict[str, int]:
        """Return names and sizes (bytes) of a repository's files. Raises WeightsError."""

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        """Download one file into the cache. Raises WeightsError."""


class HuggingFace:
    """The Hugging Face hub. Respects HF_HOME, HF_HUB_OFFLINE and HF_TOKEN. cache: --cache-dir or the default."""

    def __init__(self, cache: Path | None = None) -> None:
        from huggingface_hub import constants  # a slow import

        self._cache = cache or Path(constants.HF_HUB_CACHE)
        self._offline = bool(constants.HF_HUB_OFFLINE)

    @property
    def cache(self) -> Path:
        return self._cache

    @property
    def is_offline(self) -> bool:
        return self._offline

    def cached(self, repo: str, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repo, file, cache_dir=self._cache)
        return Path(path) if isinstance(path, str) else None

    def files(self, repo: str) -> dict[str, int]:
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(repo, files_metadata=True)
        except Exception as error:
            raise _download_error(repo, "", error) from error
        return {item.rfilename: item.size or 0 for item in info.siblings or ()}

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(repo, file, cache_dir=self._cache, tqdm_class=_counter(received)))
        except Exception as error:
            raise _download_error(repo, file, error) from error


def fetch_files(hub: WeightHub, repo: str, files: Mapping[str, int], progress: WeightProgress | None) -> None:
    """Download files that are not cached. files: names and sizes. progress: (bytes so far, total bytes, repo: file).

    Raises WeightsError. Received data stays in the cache, and a later call resumes.
    """
    total, arrived = sum(files.values()), 0
    for file, size in files.items():
        before = arrived

        def received(count: int, file: str = file) -> None:
            nonlocal arrived
            arrived += count
            if progress is not None:
                progress(min(arrived, total), total, f"{repo}: {file}")

        if hub.cached(repo, file) is None:
            hub.fetch(repo, file, received)
        arrived = before + size
        if progress is not None:
            progress(arrived, total, f"{repo}: {file}")


def cached_or_fetched(
    hub: WeightHub,
    repo: str,
    find: Callable[[], Path],
    choose: Callable[[Mapping[str, int]], Mapping[str, int]],
    ways: str,
    progress: WeightProgress | None,
) -> Path:
    """Return the folder that `find` finds in the cache, after a download if it raises WeightsError.

    choose: chooses the files to download from those of the repository, with their sizes. ways: what else the operator
    can do, for errors. Raises WeightsError.
    """
    try:
        return find()
    except WeightsError as missing:
        if hub.is_offline:
            detail = f"{missing.title}; looked in {hub.cache}; downloads are disabled (HF_HUB_OFFLINE)"
            raise WeightsError(
                f"the weights of {repo} are not on this machine", detail, ways, **missing.facts
            ) from missing
    if progress is not None:
        progress(0, 0, repo)  # named before the first answer of the network, which may never come
    try:
        fetch_files(hub, repo, choose(hub.files(repo)), progress)
    except WeightsError as error:
        raise WeightsError(
            error.title, f"{error.detail}; looked in {hub.cache} first", f"{error.hint}; {ways}", **error.facts
        ) from error
    return find()


def cached_checkpoint(
    hub: WeightHub, repo: str, files: Iterable[str], check: Callable[[Path], Path], ways: str
) -> Path:
    """Return the folder of a checkpoint in the cache, as `check` returns it.

    files: names that the folder must contain, in its top level. ways: see `cached_or_fetched`. Raises WeightsError with
    the first missing or damaged file.
    """
    paths = {file: hub.cached(repo, file) for file in files}
    for file, path in paths.items():
        if path is None:
            raise WeightsError(f"{file} of {repo} is missing", hint=ways, file=file)
    return check(next(path.parent for path in paths.values() if path is not None))


def chosen_files(
    repo: str, listed: Mapping[str, int], patterns: Iterable[str], needed: Mapping[str, str], ways: str
) -> dict[str, int]:
    """Return the repository files that match a pattern, with their sizes.

    A pattern without a slash matches files in the top level only. needed: patterns that a file must match -> a noun
    for errors. ways: see `cached_or_fetched`. Raises WeightsError if no file matches one of `needed`.
    """
    files = {name: size for name, size in listed.items() if any(_matches(name, pattern) for pattern in patterns)}
    for pattern, kind in needed.items():
        if not any(_matches(name, pattern) for name in files):
            detail = f"it lists {len(listed)} files and no {pattern}"
            raise WeightsError(f"{repo} contains no {kind}", detail, ways, file=pattern)
    return files


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and ("/" in pattern or "/" not in name)


def _counter(received: Received) -> type[Any]:
    """Return a tqdm class that draws nothing and reports bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            received(int(n or 0))
            return None

    return Counter


def _download_error(repo: str, file: str, error: Exception) -> WeightsError:
    from huggingface_hub.errors import GatedRepoError

    what = f"{file} of {repo}" if file else repo
    detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
    hint = "check the connection"
    if isinstance(error, GatedRepoError):
        hint = f"accept the licence at https://huggingface.co/{repo} and set HF_TOKEN"
    return WeightsError(f"cannot download {what}", detail, hint, file=file or repo)


def linked_folder(links: Mapping[str, Path], parent: Path) -> Path:
    """Return a folder in `parent` with a symbolic link from each name to its path.

    It gives all processes of a deployment a single weights path. The folder is created atomically; equal links give
    the same folder. Raises WeightsError if `parent` cannot be written.
    """
    listing = "\n".join(f"{name}\t{path.resolve()}" for name, path in sorted(links.items()))
    folder = parent / hashlib.sha256(listing.encode()).hexdigest()[:16]
    try:
        if not folder.exists():
            parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".", dir=parent))
            for name, path in links.items():
                (scratch / name).symlink_to(path.resolve())
            _rename(scratch, folder)
    except OSError as error:
        raise WeightsError(
            f"cannot write {folder}", str(error), "choose a writable folder with --cache-dir DIR", file=str(folder)
        ) from error
    return folder


def _rename(scratch: Path, folder: Path) -> None:
    try:
        os.rename(scratch, folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not folder.exists():  # else another process created the same folder first
            raise


def generated_checkpoint(folder: Path, name: str, version: int, write: Callable[[Path], None]) -> Path:
    """Write the checkpoint `name` to `folder`, unless this version is there. Returns `folder`.

    write: fills an empty folder. It imports heavy modules (torch) itself, because it is not always called. With
    several processes, one writes and the others wait for a file lock. Another version is replaced. Raises StartError
    if the folder cannot be written.
    """
    if _is_current(folder, version):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not _is_current(folder, version):
                _replace(folder, {"model": name, "version": version}, write)
    except OSError as error:
        hint = "choose a writable folder with --cache-dir DIR"
        raise StartError(
            f"cannot write the checkpoint {name} to {folder}", str(error), hint, phase="weights"
        ) from error
    return folder


def shipped_checkpoint(folder: Path, name: str, file: str = "model.safetensors") -> Path:
    """Return the folder of the miniature `name`, which the package contains. Raises WeightsError without its weights.

    file: of the weights, which the folder holds.
    """
    weights = folder / file
    if not weights.is_file():
        raise WeightsError(
            f"{name} has no weights in this package",
            f"{weights} does not exist",
            "train it with the script in the plugin's train/ folder, or start the :tiny checkpoint",
            file=str(weights),
        )
    return folder


def _is_current(folder: Path, version: int) -> bool:
    try:
        return bool(json.loads((folder / STAMP).read_text())["version"] == version)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replace(folder: Path, stamp: dict[str, object], write: Callable[[Path], None]) -> None:
    with _scratch(folder) as scratch:
        write(scratch)
        (scratch / STAMP).write_text(json.dumps(stamp) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(scratch, folder)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Create a temporary folder beside `folder`. It is removed at the end unless renamed."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
