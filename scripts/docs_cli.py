"""Text of docs/cli.md: the help of every command at a fixed width. Used by docs_parts.py."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

WIDTH = "100"
GLOBAL = (
    "-o, --output",
    "-c, --context",
    "--socket PATH",
    "--no-color",
    "-q, --quiet",
    "-v, --verbose",
    "--debug",
    "--yes",
    "-h, --help",
)


def cli_page() -> str:
    """Return a section per command, subcommands below their group. Options of every command appear once."""
    from mstarctl.main import VERBS

    sections = [section for verb in VERBS for section in _sections((verb.name,))]
    return "\n".join(["```text", _help(()), "```", "", *sections])


def _sections(words: tuple[str, ...]) -> Iterator[str]:
    text = _help(words)
    kept = [line for line in text.splitlines() if not line.strip().startswith(GLOBAL)]
    body = "\n".join(kept).replace("Options:\n\n", "").rstrip().removesuffix("Options:").rstrip()
    yield f"{'#' * (len(words) + 1)} mstarctl {' '.join(words)}\n\n```text\n{body}\n```\n"
    for command in _commands(text):
        yield from _sections((*words, command))


def _commands(text: str) -> list[str]:
    _, found, after = text.partition("\nCommands:\n")
    return [line.split()[0] for line in after.splitlines() if found and line[:2] == "  " and line[2:3].strip()]


def _help(words: tuple[str, ...]) -> str:
    from mstarctl.main import run

    out = io.StringIO()
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(out):
            run([*words, "--help"])
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return out.getvalue().rstrip()
