"""Sizes of the tracked files: what a GPU machine needs of the repository, with its wheels, has to fit 64 MiB."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = 37_300_000
"""Bytes of all files that are not trained weights. Golden sets that a GPU run does not use can stay behind."""
WEIGHTS = 22 << 20
"""Bytes of the trained miniatures of nine families."""


@pytest.fixture(scope="module")
def sizes() -> dict[Path, int]:
    """Return the bytes of each tracked file, by its path below the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = (Path(name) for name in listed.split("\0") if name)
    return {name: (ROOT / name).stat().st_size for name in names if (ROOT / name).is_file()}


def is_miniature(path: Path) -> bool:
    """Return whether a file belongs to the checkpoint of a `MODEL:mini`."""
    return path.match("plugins/*/src/*/checkpoint/mini/*") or path.match("plugins/*/src/*/checkpoint/mini/*/*")


def test_tracked_files_leave_room_for_wheels(sizes: dict[Path, int]) -> None:
    assert sum(size for path, size in sizes.items() if not is_miniature(path)) <= SOURCES


def test_trained_weights_stay_small(sizes: dict[Path, int]) -> None:
    found = {path: size for path, size in sizes.items() if is_miniature(path)}
    assert found
    assert sum(found.values()) <= WEIGHTS


def test_the_plugin_of_language_models_stays_short() -> None:
    """It is the plugin that a newcomer reads first."""
    paths = (ROOT / "plugins" / "mstar-llm" / "src").rglob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) <= 1200
