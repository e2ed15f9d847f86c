"""The Hugging Face hub as resolvers of weights see it: what is cached, what a repository holds, files fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mstar_core.errors import WeightsError

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

Received = Callable[[int], None]
"""Called with the number of bytes that have just arrived."""


class Hub(Protocol):
    """Where official weights come from. `HuggingFace` in production, a fake in tests."""

    @property
    def cache(self) -> Path:
        """Folder of the cache."""

    @property
    def is_offline(self) -> bool:
        """Whether nothing may be fetched."""

    def cached(self, repo: str, file: str) -> Path | None:
        """The cached copy of a file, None when there is none."""

    def files(self, repo: str) -> dict[str, int]:
        """Names and sizes (bytes) of a repository's files. Raises WeightsError."""

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        """Download one file into the cache. Raises WeightsError."""


class HuggingFace:
    """The real hub, by the conventions of HF_HOME, HF_HUB_OFFLINE and HF_TOKEN. cache: --cache-dir or the default."""

    def __init__(self, cache: Path | None = None) -> None:
        from huggingface_hub import constants  # the import costs as much as a small start

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

        found = try_to_load_from_cache(repo, file, cache_dir=self._cache)
        return Path(found) if isinstance(found, str) else None

    def files(self, repo: str) -> dict[str, int]:
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(repo, files_metadata=True)
        except Exception as error:
            raise _refused(repo, "", error) from error
        return {item.rfilename: item.size or 0 for item in info.siblings or ()}

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(repo, file, cache_dir=self._cache, tqdm_class=_counter(received)))
        except Exception as error:
            raise _refused(repo, file, error) from error


def fetch_files(hub: Hub, repo: str, files: Mapping[str, int], progress: WeightProgress | None) -> None:
    """Download what is not in the cache yet. files: names and sizes. progress: (bytes so far, all bytes, file).

    Raises WeightsError; what has arrived stays, and a later call goes on from there.
    """
    total, arrived = sum(files.values()), 0
    for file, size in files.items():
        before = arrived

        def received(count: int, file: str = file) -> None:
            nonlocal arrived
            arrived += count
            if progress is not None:
                progress(min(arrived, total), total, file)

        if hub.cached(repo, file) is None:
            hub.fetch(repo, file, received)
        arrived = before + size
        if progress is not None:
            progress(arrived, total, file)


def _counter(received: Received) -> type[Any]:
    """A progress bar that draws nothing and reports bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            received(int(n or 0))
            return None

    return Counter


def _refused(repo: str, file: str, error: Exception) -> WeightsError:
    from huggingface_hub.errors import GatedRepoError

    what = f"{file} of {repo}" if file else repo
    detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    hint = "check the connection, or use --weights DIR, --cache-dir DIR, or start the miniature (NAME:tiny)"
    if isinstance(error, GatedRepoError):
        hint = f"accept the licence at https://huggingface.co/{repo} and set HF_TOKEN, or use --weights DIR"
    return WeightsError(f"cannot fetch {what}", detail, hint, file=file or repo)
