"""Printer of a command: items on stdout in the format of -o, narration on stderr. Created by each command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import typer

from mstar_core.errors import UsageError
from mstarctl.output.options import GlobalOptions
from mstarctl.output.paint import Paint
from mstarctl.output.states import state_role
from mstarctl.output.table import MISSING, Column, render_table

NAMES: Final = ("name", "id")
STATES: Final = ("state", "level")
"""Columns whose cells have the colour of a state or of a name."""


@dataclass(slots=True)
class Printer:
    """Writes the output of one command. stdout and stderr are those of the process at the time of writing."""

    options: GlobalOptions = field(default_factory=GlobalOptions)

    @classmethod
    def of(cls, context: typer.Context) -> Printer:
        """Return the printer of the running command."""
        return cls(context.obj if isinstance(context.obj, GlobalOptions) else GlobalOptions())

    @property
    def format(self) -> str:
        return self.options.output

    @property
    def is_machine(self) -> bool:
        """Whether a program reads stdout (json, yaml or name)."""
        return self.options.output in ("json", "yaml", "name")

    def items(
        self,
        kind: str,
        items: Sequence[Mapping[str, Any]],
        columns: Sequence[Column],
        *,
        truncated: int = 0,
        empty: str = "",
    ) -> None:
        """Print a list of objects, each with a `name` and values in base units. empty: narration for an empty list."""
        if self.format == "name":
            for item in items:
                self.text(f"{kind}/{item['name']}")
        elif self.is_machine:
            self.data({"kind": kind, "items": list(items), "truncated": truncated})
        elif not items:
            self.say(empty or f"no {kind}s")
        else:
            colour = self._cell if self.options.is_coloured() else None
            for line in render_table(items, columns, is_wide=self.format == "wide", colour=colour):
                self.text(line)
            if truncated:
                self.say(f"{truncated} more {'is' if truncated == 1 else 'are'} not shown")

    def item(self, kind: str, item: Mapping[str, Any], text: str | Sequence[str]) -> None:
        """Print one object. text: its human-readable form."""
        if self.format == "name":
            self.text(f"{kind}/{item['name']}")
        elif self.is_machine:
            self.data({"kind": kind, "items": [item], "truncated": 0})
        else:
            for line in [text] if isinstance(text, str) else text:
                self.text(line)

    def data(self, value: Any, named: str = "") -> None:
        """Print a document as JSON, or, as -o says, as YAML or by its name (`named`, kind/name)."""
        if self.format == "name" and named:
            self.text(named)
            return
        plain = plain_data(value)
        if self.format == "yaml":
            self.text(_yaml(plain))
        else:
            self.text(json.dumps(plain, indent=2, ensure_ascii=False))

    def line(self, value: Any, named: str) -> None:
        """Print one object of a stream, for `--watch` and `-f`: a line of NDJSON, a YAML document, or its name."""
        if self.format == "name":
            self.text(named, is_flushed=True)
        elif self.format == "yaml":
            self.text(f"---\n{_yaml(plain_data(value))}", is_flushed=True)
        else:
            self.text(json.dumps(plain_data(value), ensure_ascii=False), is_flushed=True)

    def text(self, line: str, *, is_flushed: bool = False) -> None:
        """Print one line of data."""
        try:
            print(line, file=sys.stdout, flush=is_flushed)
        except BrokenPipeError as closed:
            raise typer.Exit from closed  # the reader, such as `head`, closed the pipe

    def say(self, line: str) -> None:
        """Print one line of narration; nothing with -q."""
        if not self.options.quiet:
            print(line, file=sys.stderr, flush=True)

    def detail(self, line: str) -> None:
        """Print one line of narration with -v."""
        if self.options.verbose:
            self.say(line)

    def warn(self, line: str) -> None:
        """Print a warning, also with -q."""
        print(f"{self.paint('warning:', 'warn', sys.stderr)} {line}", file=sys.stderr, flush=True)

    def problem(self, text: str) -> None:
        """Print an error that does not end the command, also with -q."""
        print(text, file=sys.stderr, flush=True)

    def paint(self, text: str, role: str, stream: TextIO | None = None) -> str:
        """Return `text` in the colour of a role of `top`'s palette if the stream (stdout) takes colour."""
        return Paint.of(self.options, stream).text(text, role)

    def _cell(self, text: str, key: str, is_title: bool) -> str:
        """Colour a cell of a table: titles, names, states; a missing value is dim."""
        if is_title:
            return self.paint(text, "head")
        role = "dim" if text == MISSING else "strong" if key in NAMES else state_role(text) if key in STATES else ""
        return self.paint(text, role) if role else text

    def confirm(self, question: str) -> None:
        """Ask for confirmation. Raises UsageError if stdin is not a terminal, Abort if the answer is no."""
        if self.options.assume_yes:
            return
        if not sys.stdin.isatty():
            raise UsageError(f"the command must ask {question!r}, but stdin is not a terminal", hint="pass --yes")
        typer.confirm(question, abort=True, err=True)


def _yaml(plain: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def plain_data(value: Any) -> Any:
    """Convert a value to builtin types, including structs, dataclasses, paths, sets and enums."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True, enc_hook=str)
