"""Static checks of the tree. `make lint` runs all of them, also after a failure, so that one run reports everything."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("format", (str(BIN / "ruff"), "format", "--check", "--quiet", ".")),
    ("lint", (str(BIN / "ruff"), "check", "--quiet", ".")),
    ("types", (sys.executable, "-m", "mypy")),
    ("contracts", (str(BIN / "lint-imports"),)),
    ("docs", (sys.executable, "scripts/docs.py", "--check")),
    ("prose", (sys.executable, "scripts/prose.py")),
)


def main() -> int:
    """Run the checks in turn and print the output of those that fail. Returns 1 if any failed."""
    failed = [name for name, command in CHECKS if not passes(name, command)]
    if failed:
        print(f"failed: {', '.join(failed)}; make format fixes what it can of the first two", file=sys.stderr)
    return 1 if failed else 0


def passes(name: str, command: tuple[str, ...]) -> bool:
    """Run one check and print its line."""
    started = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    is_clean = result.returncode == 0
    print(f"{name:<10} {'ok' if is_clean else 'FAILED':<7}{time.monotonic() - started:5.1f} s", flush=True)
    if not is_clean:
        print(result.stdout.rstrip(), flush=True)
    return is_clean


if __name__ == "__main__":
    sys.exit(main())
