"""Build of the wheels of the project and every plugin. Run by `make wheels` and by the packaging tests.

Sources are copied first, so that no build output is left in the tree and two builds do not meet. No network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


def sources() -> tuple[Path, ...]:
    """Return the folders of all distributions: the root first, then the plugins by name."""
    return (ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))


def build(target: Path, folders: Sequence[Path]) -> None:
    """Build one wheel per folder into `target`. Raises CalledProcessError with pip's output shown."""
    with tempfile.TemporaryDirectory(prefix="mstar-wheels-") as name:
        copies = [copy(folder, Path(name) / folder.name) for folder in folders]
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(target), *map(str, copies)]
        subprocess.run(command, check=True)


def copy(folder: Path, to: Path) -> Path:
    """Copy only the sources of a distribution. Old build output would be packed into the wheel."""
    to.mkdir()
    for part in PARTS:
        shutil.copy2(folder / part, to / part)
    for code in ("mstarctl", "mstar_core") if folder == ROOT else ("src",):
        shutil.copytree(folder / code, to / code, ignore=LEFT_OUT)
    return to


def main() -> int:
    """Build all wheels into the given folder."""
    parser = argparse.ArgumentParser(description="build the wheels of the project and every plugin")
    parser.add_argument("target", type=Path, help="folder for the wheels; created if missing")
    target: Path = parser.parse_args().target
    build(target.resolve(), sources())
    for wheel in sorted(target.glob("*.whl")):
        print(f"{wheel}  {wheel.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
