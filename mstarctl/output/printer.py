"""How a command speaks: items in the asked-for form on stdout, narration on stderr. Made by each command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import typer

from mstar_core.errors import UsageError
from mstarctl.output.options import GlobalOptions
from mstarctl.output.table import Column, render_table


@dataclass(slots=True)
class Printer:
    """Writes one command's output. stdout and stderr default to the process's own at the time of writing."""

    options: GlobalOptions = field(default_factory=GlobalOptions)

    @classmethod
    def of(cls, context: typer.Context) -> Printer:
        """The printer of the running command: `Printer.of(ctx)`."""
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
        """A list of objects, each with a `name`. empty: narration when there is none. Values in base units for json."""
        if self.format == "name":
            for item in items:
                self.text(f"{kind}/{item['name']}")
        elif self.is_machine:
            self.data({"kind": kind, "items": list(items), "truncated": truncated})
        elif not items:
            self.say(empty or f"no {kind}")
        else:
            for line in render_table(items, columns, is_wide=self.format == "wide"):
                self.text(line)
            if truncated:
                self.say(f"{truncated} more are not shown")

    def item(self, kind: str, item: Mapping[str, Any], text: str | Sequence[str]) -> None:
        """One object; `text` is its form for people."""
        if self.format == "name":
            self.text(f"{kind}/{item['name']}")
        elif self.is_machine:
            self.data({"kind": kind, "items": [item], "truncated": 0})
        else:
            for line in [text] if isinstance(text, str) else text:
                self.text(line)

    def data(self, value: Any, named: str = "") -> None:
        """A document as JSON, or as YAML or by its name (`named`, kind/name) when that was asked for."""
        if self.format == "name" and named:
            self.text(named)
            return
        plain = plain_data(value)
        if self.format == "yaml":
            self.text(_yaml(plain))
        else:
            self.text(json.dumps(plain, indent=2, ensure_ascii=False))

    def line(self, value: Any, named: str) -> None:
        """One of many objects as it comes, for `--watch` and `-f`: a line of NDJSON, a YAML document, or its name."""
        if self.format == "name":
            self.text(named, is_flushed=True)
        elif self.format == "yaml":
            self.text(f"---\n{_yaml(plain_data(value))}", is_flushed=True)
        else:
            self.text(json.dumps(plain_data(value), ensure_ascii=False), is_flushed=True)

    def text(self, line: str, *, is_flushed: bool = False) -> None:
        """One line of data."""
        try:
            print(line, file=sys.stdout, flush=is_flushed)
        except BrokenPipeError as closed:
            raise typer.Exit from closed  # the reader (`head`) has seen enough

    def say(self, line: str) -> None:
        """One line of narration; silent with -q."""
        if not self.options.quiet:
            print(line, file=sys.stderr, flush=True)

    def detail(self, line: str) -> None:
        """One line of narration for -v."""
        if self.options.verbose:
            self.say(line)

    def warn(self, line: str) -> None:
        """A warning; shown with -q too."""
        print(f"{self.paint('warning:', 'yellow', sys.stderr)} {line}", file=sys.stderr, flush=True)

    def problem(self, text: str) -> None:
        """An error that does not end the command; shown with -q too."""
        print(text, file=sys.stderr, flush=True)

    def paint(self, text: str, colour: str, stream: TextIO | None = None) -> str:
        """`text` in one of the 16 colours when the stream takes colour."""
        return typer.style(text, fg=colour) if self.options.is_coloured(stream) else text

    def confirm(self, question: str) -> None:
        """Ask before something that cannot be undone. Raises UsageError when nobody can answer, Abort on no."""
        if self.options.assume_yes:
            return
        if not sys.stdin.isatty():
            raise UsageError(f"this asks {question!r} and stdin is no terminal", hint="pass --yes")
        typer.confirm(question, abort=True, err=True)


def _yaml(plain: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def plain_data(value: Any) -> Any:
    """Builtin types of any value: structs, dataclasses, paths, sets and enums included."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True, enc_hook=str)
