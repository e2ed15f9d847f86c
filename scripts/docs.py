"""Generator of the docs' generated parts, and check that they are current and that local links resolve.

Run by `make docs`, and with --check by `make lint`. A page marks a generated part with two comments:

    <!-- generated: make-targets -->
    <!-- end generated -->

To add a part: write a function that gives its text in scripts/docs_parts.py, name it in PARTS there, and put the marks
into a page. A file that is generated whole stands in FILES there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from docs_parts import FILES, PARTS

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- end generated -->)", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(?P<text>.+?) *$", re.MULTILINE)


def main() -> int:
    """Write the parts. Returns 1 if --check finds a stale, unknown or unused part, or a dead link."""
    parser = argparse.ArgumentParser(description="write or check the generated parts of the docs")
    parser.add_argument("--check", action="store_true", help="change nothing; say what make docs would change")
    is_check = parser.parse_args().check
    problems = [*refresh(PARTS, is_check), *rewrite(FILES, is_check), *dead_links()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def pages() -> list[Path]:
    """Return the project's pages."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*.md")]
    return sorted(found)


def refresh(parts: Mapping[str, Callable[[], str]], is_check: bool) -> Iterator[str]:
    """Write the parts, or only compare them. Yields a line for each problem."""
    used: set[str] = set()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        names = [match["name"] for match in PART.finditer(before)]
        used.update(names)
        unknown = sorted(set(names) - set(parts))
        if unknown:
            known = ", ".join(sorted(parts))
            yield f"{page.relative_to(ROOT)}: no part is called {', '.join(unknown)}; there are {known}"
            continue
        after = PART.sub(lambda match: f"{match[1]}{parts[match['name']]().strip()}\n{match[4]}", before)
        if after == before:
            continue
        if is_check:
            yield f"{page.relative_to(ROOT)}: a generated part is stale; run make docs"
        else:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    for name in sorted(set(parts) - used):
        yield f"scripts/docs_parts.py: no page shows the part {name}"


def rewrite(files: Mapping[str, Callable[[], str]], is_check: bool) -> Iterator[str]:
    """Write the generated files, or only compare them. Yields a line for each stale file."""
    for name, make in files.items():
        path = ROOT / name
        text = make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if is_check:
            yield f"{name}: stale; run make docs"
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")


def dead_links() -> Iterator[str]:
    """Find links to missing files and headings of this repository. Links with a scheme are not followed."""
    for page in pages():
        for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
            target, _, anchor = match["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                yield f"{page.relative_to(ROOT)}: link to {match['target']}, which is not there"
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                yield f"{page.relative_to(ROOT)}: link to {match['target']}, a heading that is not there"


def anchors(page: Path) -> set[str]:
    """Return the headings of a page as link targets, by the rule of the common repository hosts."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", match["text"].lower()).replace(" ", "-") for match in HEADING.finditer(text)}


if __name__ == "__main__":
    sys.exit(main())
