"""Check that a release is ready to be tagged, and print the commands that tag it.

`python scripts/release.py` compares the version of mstarctl, the plugins, their requirements and all changelogs. Exit 1
lists what disagrees. With `--draft` lines under Unreleased are allowed, as between two releases.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
VERSION: Final = Path("mstar_core/version.py")
CHANGELOG: Final = Path("CHANGELOG.md")
SECTION: Final = re.compile(r"^## (.+)$", re.M)
DATED: Final = re.compile(r"^(\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$")


def main(argv: list[str] | None = None) -> int:
    """Print what disagrees, or the commands that tag the release. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft", action="store_true", help="allow lines under Unreleased")
    options = parser.parse_args(argv)
    found = list(disagreements(ROOT, is_draft=options.draft))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return 1
    version = own_version(ROOT)
    print(f"version {version} agrees everywhere")
    print(f"  tag it: git tag -a v{version} -m 'mstarctl {version}' && git push origin v{version}")
    return 0


def own_version(root: Path) -> str:
    """Return the version of mstarctl."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / VERSION).read_text(encoding="utf-8"), re.M)
    if found is None:
        raise SystemExit(f"{VERSION} states no version")
    return found.group(1)


def disagreements(root: Path, *, is_draft: bool = False) -> Iterator[str]:
    """Yield one line for each file that does not fit the version."""
    version = own_version(root)
    yield from _changelog(root, CHANGELOG, version, is_draft=is_draft)
    major, minor, _ = (int(part) for part in version.split("."))
    pin = f"mstarctl[runtime]>={major}.{minor},<{major}.{minor + 1}"
    for path in sorted(root.glob("plugins/*/pyproject.toml")):
        shown, project = path.relative_to(root), tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        if project["version"] != version:
            yield f"{shown}: version {project['version']}, mstarctl is {version}"
        if pin not in project["dependencies"]:
            yield f"{shown}: the dependencies lack {pin}"
        yield from _changelog(root, shown.parent / CHANGELOG, version, is_draft=is_draft)


def _changelog(root: Path, path: Path, version: str, *, is_draft: bool) -> Iterator[str]:
    """Yield what is wrong with a changelog: Unreleased comes first, then the dated section of the version."""
    text = (root / path).read_text(encoding="utf-8")
    titles = SECTION.findall(text)
    if titles[:1] != ["Unreleased"]:
        yield f"{path}: the first section is not Unreleased"
        return
    dated = DATED.match(titles[1]) if len(titles) > 1 else None
    if dated is None or dated.group(1) != version:
        yield f"{path}: the section after Unreleased is not '{version} (DATE)'"
    elif not _is_date(dated.group(2)):
        yield f"{path}: {dated.group(2)} is not a date"
    unreleased = text.partition("## Unreleased")[2].partition("\n## ")[0].strip()
    if unreleased and not is_draft:
        yield f"{path}: Unreleased is not empty; move its lines to {version}, or raise the version"


def _is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
