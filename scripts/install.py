"""Installation of the project and all plugins into `.venv`, once for each state of the requirements.

Run by `make install` through install.sh, with any Python 3.11 or newer; uses the standard library alone.
What is installed is described by a stamp in the environment. While it holds nothing is done, so that every
other target may depend on this one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".mstar-installed"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = "runtime,ray,dev"
OLDEST = (3, 11)


def main() -> int:
    """Update the environment and return the exit code. A failure prints a hint on stderr."""
    if is_current():
        return 0
    with (ROOT / ".venv.lock").open("w") as lock:  # a second make target waits and finds the environment ready
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            return 0
        started = time.monotonic()
        try:
            make_environment()
            install()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"error: cannot set up {VENV.name}: {error}", file=sys.stderr)
            print(f"  try: {hint_for(error)}", file=sys.stderr)
            return 1
        STAMP.write_text(state())
        print(f"installed into {VENV.name} in {time.monotonic() - started:.0f} s")
    return 0


def is_current() -> bool:
    """Return whether the environment works and satisfies the requirements."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == state()


def state() -> str:
    """Return a hash of everything that decides the installation: requirements, constraints, script, path and Python."""
    digest = hashlib.sha256(f"{ROOT}\n{PYTHON.resolve()}\n".encode())
    for path in (
        *(plugin / "pyproject.toml" for plugin in plugins()),
        ROOT / "pyproject.toml",
        CONSTRAINTS,
        Path(__file__),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest() + "\n"


def plugins() -> tuple[Path, ...]:
    """Return the folders of the plugin distributions."""
    return tuple(sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")))


def make_environment() -> None:
    """Create `.venv`, or use the existing one. Clears a folder only if it has no Python, so no process runs from it."""
    if not PYTHON.exists():
        print(f"making {VENV.name} with Python {sys.version.split()[0]}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        return
    run([str(PYTHON), "-c", f"import sys; sys.exit(sys.version_info < {OLDEST})"])
    STAMP.unlink(missing_ok=True)  # an interrupted install must not look finished
    if not list(VENV.glob("lib/*/site-packages/pip")):  # its creation was interrupted
        run([str(PYTHON), "-m", "ensurepip"])


def install() -> None:
    """Install everything with one pip call, so that one resolution sees every requirement.

    setuptools goes first: building without isolation spares one environment for each of our distributions.
    """
    pip = pip_install()
    print("installing mstarctl, its plugins and their dependencies: some minutes the first time", flush=True)
    run([*pip, "setuptools"])
    targets = [f"{ROOT}[{EXTRAS}]", *(str(plugin) for plugin in plugins())]
    run([*pip, "--no-build-isolation", *(word for target in targets for word in ("-e", target))])


def pip_install() -> list[str]:
    """Return the pip command that prints nothing but errors: some package indexes cause pages of warnings.

    MSTAR_INSTALL_VERBOSE=1 shows everything.
    """
    command = [str(PYTHON), "-m", "pip", "install", "-c", str(CONSTRAINTS), "--disable-pip-version-check"]
    return command if os.environ.get("MSTAR_INSTALL_VERBOSE") else [*command, "--quiet", "--quiet"]


def run(command: Iterable[str]) -> None:
    """Run a command. Raises CalledProcessError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(list(command), check=True, cwd=ROOT, env=environment)


def hint_for(error: Exception) -> str:
    """Return the hint for an error."""
    command = error.cmd if isinstance(error, subprocess.CalledProcessError) else []
    if "venv" in command or "ensurepip" in command:
        return "install the venv module of this Python (Debian: python3-venv), or PYTHON=/path/to/python make install"
    if "-c" in command and "pip" not in command:
        return f"{VENV.name} is older than Python {OLDEST[0]}.{OLDEST[1]}: make clean, then make install"
    shown = "read pip's message above, or see everything: MSTAR_INSTALL_VERBOSE=1 make install"
    return f"{shown}; when the environment itself is damaged, make clean first"


if __name__ == "__main__":
    sys.exit(main())
