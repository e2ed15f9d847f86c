"""Environments of the outside programs: never the project's own. Set up once from the package registries."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "outside"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with pinned programs."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def program(self, name: str) -> str:
        """Return the path of a command that a program brought."""
        return str(self.folder / "bin" / name)

    def version(self, distribution: str) -> str:
        """Return the installed version of a program."""
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def python_environment(name: str, requirements: Sequence[str]) -> Environment:
    """Return the environment `name` with these requirements, made anew when they change."""
    folder = FOLDER / name
    stamp = folder / "requirements.sha256"
    wanted = hashlib.sha256("\n".join(requirements).encode()).hexdigest()
    environment = Environment(folder)
    if stamp.is_file() and stamp.read_text() == wanted:
        return environment
    print(f"setting up {name}: {', '.join(requirements)}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    _run([environment.python, "-m", "pip", "install", "--quiet", *requirements])
    stamp.write_text(wanted)
    return environment


def source_of(distribution: str, version: str) -> Path:
    """Return the unpacked source distribution of a program, with the tests that its authors wrote."""
    folder = FOLDER / f"{distribution}-{version}"
    if folder.is_dir():
        return folder
    downloads = FOLDER / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    options = ("--quiet", "--no-deps", "--no-binary", ":all:", "-d", str(downloads))
    _run([sys.executable, "-m", "pip", "download", *options, f"{distribution}=={version}"])
    with tarfile.open(next(downloads.glob(f"{distribution}-{version}.tar.gz"))) as archive:
        archive.extractall(FOLDER, filter="data")
    return folder


def wheel_of(distribution: str, version: str) -> Path:
    """Return the wheel of a program, without its dependencies."""
    downloads = FOLDER / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not list(downloads.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(downloads)]
        _run([*command, f"{distribution}=={version}"])
    return next(downloads.glob(pattern))


def node_environment(name: str, packages: Sequence[str]) -> Path | None:
    """Return a folder with these packages of the JavaScript registry; None on a machine without npm."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        return None
    folder = FOLDER / name
    stamp = folder / "packages.txt"
    wanted = "\n".join(packages)
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up {name}: {', '.join(packages)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        _run([npm, "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=folder)
        stamp.write_text(wanted)
    return folder


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
