"""Schemas as rules of a grammar. Used by grammars of answers and of tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

WHITE_SPACE: Final = r"\n?[ \t]{0,16}"
"""White space between two tokens of JSON: a line break and its indentation. Without a bound a model may never end."""

OPTIONS: Final = {"whitespace_pattern": WHITE_SPACE}
LENIENT: Final = {**OPTIONS, "lenient": True, "coerce_one_of": True}
"""Keywords that the compiler does not know are left out, and `oneOf` is read as `anyOf`."""


def json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return the right side of a rule: JSON that obeys a schema. is_strict: a keyword without a grammar is an error."""
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS if is_strict else LENIENT})}"
