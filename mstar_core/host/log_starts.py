"""Log folders of a deployment's starts, one below the other's name by time. Pruned by `up` and by the supervisor."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

DAY_S: Final = 86_400.0


def prune_starts(root: Path, *, keep: int, max_days: float | None, now: float) -> list[Path]:
    """Remove the folders of old starts and return them. The newest folder always stays.

    root: folder of one deployment's starts, whose names sort by time. keep: starts that stay. max_days: age in days of
    the newest file at which a start is removed; None: no limit. now: seconds since the epoch.
    """
    starts = sorted(path for path in root.iterdir() if path.is_dir())
    over = set(starts[:-keep])
    if max_days is not None:
        over |= {path for path in starts[:-1] if now - _written(path) > max_days * DAY_S}
    removed = [path for path in starts if path in over]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _written(folder: Path) -> float:
    """Return the time at which the newest file of a start was written."""
    newest = 0.0
    for path in (folder, *folder.iterdir()):
        with suppress(OSError):  # removed by another start meanwhile
            newest = max(newest, path.stat().st_mtime)
    return newest
