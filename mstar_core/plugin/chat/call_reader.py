"""Reader of one tool call: its name and arguments in a JSON object that arrives in parts. Used by the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final, Literal, NoReturn

from mstar_core.plugin.chat.format import ToolFormat

SPACE: Final = " \t\n\r"
"""White space of JSON."""

MAX_DEPTH: Final = 32
"""Deepest nesting of a call. The api accepts no deeper JSON, so a deeper call could not be sent back to it."""

HEAD_CHARS: Final = 4096
"""Longest start of an object in which the first key, or the name of a call, is looked for before its end."""

BESIDE: Final = frozenset(("id", "type"))
"""Members of a call that some models write beside its name and arguments."""

NO_ARGUMENTS: Final = "{}"

_PLAIN: Final = re.compile(r"[ \t\n\r,:0-9+\-.eEtrufalsn]*")
_STRING: Final = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_CLOSING: Final = {"{": "}", "[": "]"}
_QUOTED: Final = r'"((?:[^"\\]+|\\.)*)"'
_SKIP: Final = "[ \t\n\r]*"


class ObjectScanner:
    """Search for the end of a JSON object that arrives in parts.

    state: `broken` behind the first impossible character. at: how far it has come; the end of a whole object.
    inner_end: end of the first object or list within it, -1 before.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "whole", "broken"] = "open"
        self.at = 0
        self.inner_end = -1
        self._is_string = False
        self._closing: list[str] = []

    def scan(self, text: str) -> None:
        """Go on in `text`, which holds the object from its brace on, and begins with the text of the last call."""
        goes_on = True
        while goes_on and self.state == "open":
            goes_on = self._string(text) if self._is_string else self._plain(text)

    def _string(self, text: str) -> bool:
        match = _STRING.match(text, self.at)
        assert match is not None
        self.at = match.end()
        if self.at == len(text) or text[self.at] != '"':  # an escape may be cut behind its backslash
            return False
        self.at += 1
        self._is_string = False
        return True

    def _plain(self, text: str) -> bool:
        match = _PLAIN.match(text, self.at)
        assert match is not None
        self.at = match.end()
        if self.at == len(text):
            return False
        char = text[self.at]
        self.at += 1
        if char == '"':
            self._is_string = True
        elif char in _CLOSING and len(self._closing) < MAX_DEPTH:
            self._closing.append(_CLOSING[char])
        elif self._closing and char == self._closing[-1]:
            self._close()
        else:
            self.state = "broken"
        return True

    def _close(self) -> None:
        self._closing.pop()
        if not self._closing:
            self.state = "whole"
        elif len(self._closing) == 1 and self.inner_end < 0:
            self.inner_end = self.at


class CallSyntax:
    """Form of the calls of a format, and the names of the tools of a request."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._keys = BESIDE | {form.name_key, form.arguments_key}
        name, arguments = (re.escape(json.dumps(key)) for key in (form.name_key, form.arguments_key))
        self._first = re.compile(rf"\{{{_SKIP}{_QUOTED}{_SKIP}:", re.DOTALL)
        self._head = re.compile(
            rf"\{{{_SKIP}{name}{_SKIP}:{_SKIP}{_QUOTED}{_SKIP},{_SKIP}{arguments}{_SKIP}:{_SKIP}(?=\{{)", re.DOTALL
        )

    def first_key(self, text: str) -> tuple[int, bool] | None:
        """Return the end of an object's first key, and whether a call has such a key. None: it is not known yet."""
        match = self._first.match(text, 0, HEAD_CHARS)
        return None if match is None else (match.end(), _json(f'"{match[1]}"') in self._keys)

    def head(self, text: str) -> tuple[str, int] | None:
        """Return the name of a call and the start of its arguments, if it begins with them."""
        match = self._head.match(text, 0, HEAD_CHARS)
        name = None if match is None else _json(f'"{match[1]}"')
        return (name, match.end()) if match is not None and isinstance(name, str) and name in self._names else None

    def call(self, text: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a whole object, None if it is not a call of one of the tools."""
        members = _members(text)
        name = _json(members.get(self._form.name_key, ""))
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = members.get(self._form.arguments_key, "null")
        value = _json(arguments)
        if isinstance(value, str):  # some models quote the object
            arguments, value = value.strip(SPACE), _json(value)
        if value is None:
            return name, NO_ARGUMENTS
        return (name, arguments) if isinstance(value, dict) else None


class CallReader:
    """Reader of one call. name: None until the call begins. state: `open`, `whole`, or `broken` if it is not a call.

    streams: the call begins as soon as its name is known, because a grammar holds what follows.
    """

    def __init__(self, syntax: CallSyntax, *, streams: bool) -> None:
        self.name: str | None = None
        self._syntax = syntax
        self._streams = streams
        self._scanner = ObjectScanner()
        self._is_checked = False
        self._sent = 0
        self._foreign_end = -1

    @property
    def state(self) -> Literal["open", "whole", "broken"]:
        return "broken" if self._foreign_end >= 0 else self._scanner.state

    @property
    def end(self) -> int:
        """Return where the object ends, or what shows that it is not a call."""
        return self._foreign_end if self._foreign_end >= 0 else self._scanner.at

    def read(self, text: str) -> str:
        """Return the new text of the arguments. text: the object from its brace on, and all that has followed."""
        if not self._is_checked and (key := self._syntax.first_key(text)) is not None:
            end, self._is_checked = key
            if not self._is_checked:
                self._foreign_end = end
                return ""
        self._scanner.scan(text)
        if self.name is None and self._streams and (head := self._syntax.head(text)) is not None:
            self.name, self._sent = head
        if self.name is not None:
            return self._arguments(text)
        if self._scanner.state != "whole":
            return ""
        call = self._syntax.call(text[: self._scanner.at])
        if call is None:
            self._foreign_end = self._scanner.at
            return ""
        self.name, arguments = call
        return arguments

    def _arguments(self, text: str) -> str:
        end = self._scanner.at if self._scanner.inner_end < 0 else self._scanner.inner_end
        news = text[self._sent : end]
        self._sent = max(self._sent, end)
        return news


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key is duplicated")
    return members


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object)
_INVALID: Final = object()


def _json(text: str) -> Any:
    """Return the value of a JSON text, `_INVALID` if it is none that the api accepts."""
    try:
        value = _DECODER.decode(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses infinity and unpaired surrogates
    except (ValueError, RecursionError):
        return _INVALID
    return value


def _members(text: str) -> dict[str, str]:
    """Return the text of each value of a JSON object, by key; empty if the object is not valid."""
    members: dict[str, str] = {}
    if not isinstance(_json(text), dict):
        return members
    at = _skipped(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skipped(text, _skipped(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        members[key] = text[start:at]
        at = _skipped(text, at)
        at = _skipped(text, at + 1) if text[at] == "," else at
    return members


def _skipped(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at
