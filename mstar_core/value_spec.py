"""Type, range and default of one value. Base of request parameters and configuration keys."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import Any, Final

MAP: Final = "map of integer to "
"""Start of the kind of a mapping from ids to numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSpec:
    """Type, range, default and documentation of one value. Base of request parameters and configuration keys."""

    kind: str
    doc: str
    default: Any = None
    required: bool = False
    nullable: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()

    @property
    def limits_text(self) -> str:
        """The range as people read it, such as `> 0 and <= 1`; empty without limits."""
        limits = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {_short(limit)}" for sign, limit in limits if limit is not None)

    @property
    def bounds(self) -> dict[str, float]:
        """The limits under their JSON schema names."""
        limits = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le, "exclusiveMaximum": self.lt}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def contains(self, number: float) -> bool:
        """Whether a number is within the limits."""
        return (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )


def _short(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def value_kind(hint: Any) -> tuple[str, bool]:
    """Return the kind of a type, as `ValueSpec` names it, and whether it may be null."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return value_kind(inner[0])[0], True
        return "any", len(inner) < len(args)
    origin = typing.get_origin(hint)
    if origin in (tuple, list):
        item = value_kind(args[0])[0] if args else "any"
        return f"list of {item}", False
    if origin is dict and args[0] is int:
        return MAP + value_kind(args[1])[0], False
    return {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}.get(
        origin or hint, "any"
    ), False
