"""Form of an answer's text that a request asks for. Read by the api; a grammar is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonText:
    """JSON that obeys a schema. is_strict: every keyword holds; otherwise those that no grammar has are left out."""

    schema: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenText:
    """Text that obeys a grammar in the form of Lark, or a regular expression."""

    form: Literal["grammar", "regex"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenText:
    """One of several texts."""

    texts: tuple[str, ...]


ContentForm = JsonText | WrittenText | ChosenText
