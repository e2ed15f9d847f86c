"""Faults of a deployment file, collected so that one message reports all of them. Used by `resolve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.errors import ConfigError

MOST: Final = 20
"""Faults that one message lists."""


@dataclass(slots=True)
class Faults:
    """Faults of one file. Its owner checks every part inside `collected` and calls `check` at the end."""

    errors: list[ConfigError] = field(default_factory=list)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Record a ConfigError of the block instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.errors += faults_of(error)

    def spoil(self, section: str) -> bool:
        """Return whether a fault is at a section, so that checks of the section as a whole make no sense."""
        keys = [str(error.facts.get("key") or "") for error in self.errors]
        return any(key in ("", section) or key.startswith(f"{section}.") for key in keys)

    def check(self) -> None:
        """Raise a fault alone, or one ConfigError that lists all of them in the order of their lines."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        ordered = sorted(self.errors, key=lambda error: int(error.facts.get("line") or 0))
        first, rest = ordered[0], len(ordered) - MOST
        lines = [_line(error) for error in ordered[:MOST]] + ([f"and {rest} more"] if rest > 0 else [])
        facts: dict[str, Any] = {key: first.facts.get(key) for key in ("file", "line", "key", "nearest")}
        named = first.facts.get("file") or "the configuration"
        raise ConfigError(f"{named} has {len(ordered)} faults", "\n".join(lines), faults=tuple(ordered), **facts)


def faults_of(error: ConfigError) -> list[ConfigError]:
    """Return the faults that an error lists; the error itself if it is one fault."""
    return list(error.facts.get("faults") or (error,))


def _line(error: ConfigError) -> str:
    file, line = error.facts.get("file"), error.facts.get("line")
    place = f"{file}:{line}: " if file and line else ""
    why = "; ".join(part for part in (*error.detail.splitlines(), error.hint) if part)
    return f"{place}{error.title}" + (f"; {why}" if why else "")
