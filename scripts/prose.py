"""Language check of docstrings, comments, messages and pages: headless clauses, words for people, exempt formatting.

`make lint` checks the whole tree, `python scripts/prose.py PATH ...` single files or folders. Patterns find only a part
of what docs/development.md asks for in its section "Language".
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXEMPT = {"scripts/prose.py", "tests/scripts/test_prose.py"}
"""Files that must spell the patterns."""

HEADLESS = re.compile(r"(What|How|Who|Whose|Which|Where|When|Whoever)\b(?! (?:to|not to)\b)")
"""A docstring that begins with a clause instead of a noun phrase or an imperative."""

PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(nobody|somebody|everybody|whoever|whomever)\b", re.I), "name the caller, request or process"),
    (re.compile(r"\b(?:is|are|was|were|be|been|being) told\b"), "use notified, reported, configured or sent"),
    (
        re.compile(r"\bwho (?:waits?|asks?|has|is|gives?|came|comes?|holds?|met|needs?|reads?|calls?|knows?|takes?)\b"),
        "requests and processes are not people: name the thing that acts",
    ),
    (re.compile(r"\b(?:by|takes?|at) the word of\b"), "say which source is used"),
    (re.compile(r"\bgives? way\b"), "use yields or is preempted"),
    (re.compile(r"\bin company\b"), "use batched together"),
    (
        re.compile(r"(?<!there )(?<!There )\b(?:is|are) no (?!longer|more\b|less\b|later\b|other\b)(?=[a-z])"),
        "say what it is or must be",
    ),
    (re.compile(r"#\s*fmt:\s*(?:skip|off)"), "ruff format decides how the code looks"),
)


class Finding(NamedTuple):
    """One place to rewrite. line: from 1."""

    path: Path
    line: int
    text: str
    advice: str


def main(arguments: list[str]) -> int:
    """Check the given paths, by default every tracked file. Returns 1 when anything was found."""
    findings = [found for path in files(arguments) for found in check(path)]
    for path, line, text, advice in findings:
        print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {text!r}: {advice}")
    return 1 if findings else 0


def files(arguments: list[str]) -> Iterator[Path]:
    """Tracked Python files and pages below the given paths."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(arguments or ["."])]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in listed:
        if name.endswith((".py", ".md")) and name not in EXEMPT and (ROOT / name).is_file():
            yield ROOT / name


def check(path: Path) -> Iterator[Finding]:
    """Findings of one file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for number, line in enumerate(source.splitlines(), start=1):
            yield from _matches(path, number, line)
        return
    if not _may_have_findings(source):  # parsing every file takes longer than the rest of the check
        return
    for line, docstring in docstrings(source):
        first = docstring.strip()
        if HEADLESS.match(first):
            yield Finding(path, line, first.split("\n")[0][:60], "begin with a noun phrase or an imperative")
        for offset, text in enumerate(docstring.splitlines()):
            yield from _matches(path, line + offset, text)
    for line, text in comments(source):
        yield from _matches(path, line, text)
    for line, text in messages(source):
        yield from _matches(path, line, text)


def _may_have_findings(source: str) -> bool:
    """Return whether a search over the whole text finds anything, adjacent strings joined."""
    joined = re.sub(r"""["']\s*\n\s*[rf]*["']""", "", source)
    headless = re.compile(r"""["']\s*""" + HEADLESS.pattern)
    return bool(headless.search(joined)) or any(pattern.search(joined) for pattern, _ in PATTERNS)


def _matches(path: Path, line: int, text: str) -> Iterator[Finding]:
    for pattern, advice in PATTERNS:
        for match in pattern.finditer(text):
            start = max(0, match.start() - 20)
            yield Finding(path, line, text[start : match.end() + 30].strip(), advice)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings with their first line, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        for child in _body(node):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(source: str) -> Iterator[tuple[int, str]]:
    """String constants that read like sentences: error texts, hints, help and log lines."""
    tree = ast.parse(source)
    own = {id(child.value) for node in ast.walk(tree) for child in _body(node) if isinstance(child, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in own and text.count(" ") >= 2:
                yield node.lineno, text


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
