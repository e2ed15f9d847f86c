"""Contents of dialogs: help, fields, JSON, questions. Pure functions from data to lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import msgspec

from mstar_core.observe.glossary import GLOSSARY, Term
from mstarctl.output.line import Line, cells, fit, left, line, safe, wrap
from mstarctl.top.data.deployments import OtherDeployment
from mstarctl.top.data.view import View
from mstarctl.top.keys import Key
from mstarctl.top.layout.header import state_mark
from mstarctl.top.layout.pages import field_text


def help_rows(keys: Sequence[Key], width: int) -> list[Line]:
    """Draw the active keys by group, in two columns if there is room, the filter language and the glossary."""
    groups = list(dict.fromkeys(key.group for key in keys))
    blocks = [
        [line((group, "title")), *(_key_row(key) for key in keys if key.group == group), line()] for group in groups
    ]
    if width < 92:
        rows = [row for block in blocks for row in block]
    else:
        half = (sum(len(block) for block in blocks) + 1) // 2
        columns: list[list[Line]] = [[], []]
        for block in blocks:
            columns[0 if len(columns[0]) + len(block) // 2 < half else 1].extend(block)
        tall = max(len(column) for column in columns)
        column_width = width // 2
        rows = [
            fit(columns[0][n] if n < len(columns[0]) else line(), column_width)
            + fit(columns[1][n] if n < len(columns[1]) else line(), width - column_width)
            for n in range(tall)
        ]
    rows += [
        line(("Filter", "title")),
        *(line(("  ", ""), (left(terms, 44), "value"), (what, "dim")) for terms, what in FILTERS),
    ]
    rows += [line(), line(("Words", "title")), *(_term_row(term) for term in GLOSSARY)]
    return [fit(row, width) for row in rows]


def _term_row(term: Term) -> Line:
    unit = f" {term.unit}" if term.unit else ""
    return line("  ", (left(term.word, 24), "value"), (f"{term.short}{',' if unit else ''}{unit}", "dim"))


FILTERS = (
    ("state:queue node:talker rank:1 host:node-b", "a glob on a field; terms are joined by AND"),
    ("ttft>500 age>=2s tokens<100 rtf>0.8", "comparisons, with units for times"),
    ("err  !err  speech  /r-7f[0-9]/", "flag, negation, word, regular expression"),
    ("state:queue OR ttft>2s", "alternatives"),
)


def _key_row(key: Key) -> Line:
    return line("  ", (left(key.shown, 6), "key"), (key.help, ""))


HIDDEN: Final = ("handle", "t", "rev")
"""Numbers that only programs need; `y` shows them."""


def fields_rows(view: View, item: msgspec.Struct, width: int) -> list[Line]:
    """Draw the fields with their values, one per line, long values wrapped. Moments are times of day."""
    names = [name for name in item.__struct_fields__ if name not in HIDDEN]
    wide = max(len(name) for name in names) + 2
    rows = []
    for name in names:
        text = field_text(view, name, getattr(item, name)) or "-"
        pieces = wrap(text, max(8, width - wide))
        for index, piece in enumerate(pieces):
            label = name.replace("_", " ") if index == 0 else ""
            rows.append(line((left(label, wide), "dim"), (piece, "faint" if text == "-" else "value")))
    return rows


def json_rows(item: object, width: int) -> list[Line]:
    """Draw an object as indented JSON."""
    text = json.dumps(msgspec.to_builtins(item, enc_hook=str, str_keys=True), indent=2, ensure_ascii=False)
    rows = []
    for row in text.splitlines():
        body = safe(row)
        name, colon, rest = body.partition('": ')
        if colon and cells(body) <= width:
            rows.append(line((name + '"', "accent"), (": ", "dim"), (rest, "value")))
        else:
            rows += [line((piece, "value")) for piece in wrap(body, width)]
    return rows


def question_rows(question: str, answers: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Draw a question and its answers, one per line."""
    rows = [line((piece, "strong")) for piece in wrap(safe(question), width)]
    return [*rows, line(), *(line("  ", (left(key, 4), "key"), (text, "")) for key, text in answers)]


def other_rows(
    here: str, shown: Sequence[tuple[str, OtherDeployment]], count: int, wide: int, view: View, width: int
) -> list[Line]:
    """Draw the other deployments with key, state and load. count: of all that run."""
    rows = [line(("this is ", "dim"), (safe(here), "strong")), line()]
    for key, other in shown:
        load = "" if other.load is None else f"   {other.load[0]} run  {other.load[1]} queued"
        name = line("  ", (left(key, 4), "key"), (left(safe(other.name), wide), "value"))
        rows.append(name + state_mark(other.state, view) + line((load, "dim")))
    if count > len(shown):
        rows.append(line((f"  {count - len(shown)} more: mstarctl top NAME", "faint")))
    return [fit(row, width) if row.width > width else row for row in rows]
