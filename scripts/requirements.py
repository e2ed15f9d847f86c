"""List of the packages that this distribution needs with some of its extras, one per line. Used by the Containerfile.

An image installs them in a layer of their own, which stays the same while only the project's code changes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the project and of these extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def main() -> int:
    """Print the requirements of the extras on the command line, separated by commas."""
    if len(sys.argv) != 2:
        print("usage: requirements.py EXTRA,EXTRA", file=sys.stderr)
        return 2
    try:
        print("\n".join(requirements(sys.argv[1].split(","))))
    except KeyError as error:
        print(f"error: pyproject.toml has no extra {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
