"""Build the wheels of the project and every plugin. Run by `make wheels` and by the packaging tests.

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
ROOT_PARTS = ("pyproject.toml", "README.md", "LICENSE", "mstarctl", "mstar_core")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "tests")


def sources() -> tuple[Path, ...]:
    """The folders of all distributions: the root first, then the plugins by name."""
    return (ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))


def build(target: Path, folders: Sequence[Path]) -> None:
    """Build one wheel per folder into `target`. Raises CalledProcessError with pip's output shown."""
    with tempfile.TemporaryDirectory(prefix="mstar-wheels-") as name:
        copies = [copy(folder, Path(name) / folder.name) for folder in folders]
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(target), *map(str, copies)]
        subprocess.run(command, check=True)


def copy(folder: Path, to: Path) -> Path:
    """Copy what a distribution is built from. Of the root only the parts that go into its wheel."""
    if folder != ROOT:
        return Path(shutil.copytree(folder, to, ignore=LEFT_OUT))
    to.mkdir()
    for part in ROOT_PARTS:
        source = folder / part
        if source.is_dir():
            shutil.copytree(source, to / part, ignore=LEFT_OUT)
        else:
            shutil.copy2(source, to / part)
    return to


def main() -> int:
    """Build all into the folder that is named."""
    parser = argparse.ArgumentParser(description="build the wheels of the project and every plugin")
    parser.add_argument("target", type=Path, help="folder for the wheels; made when it is not there")
    target: Path = parser.parse_args().target
    build(target.resolve(), sources())
    for wheel in sorted(target.glob("*.whl")):
        print(f"{wheel}  {wheel.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
