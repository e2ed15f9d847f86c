"""Value of a deployment file with its position. Made by `parse`, checked by `read`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mstar_core.errors import ConfigError


@dataclass(slots=True)
class Located:
    """A value with its position. value: a scalar, a list of Located, or a dict of them.

    source: `FILE:LINE`, or the flag that set it.
    """

    value: Any
    source: str
    file: str | None = None
    line: int | None = None

    def plain(self) -> Any:
        """Return the value without positions."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def error(self, title: str, key: str, detail: str = "", hint: str = "") -> ConfigError:
        """Return a ConfigError that names the key and this position: its file and line, or its flag."""
        near = hint.removeprefix("did you mean '").removesuffix("'?") if hint.startswith("did you mean") else None
        where = "" if self.file else f"from {self.source}"
        text = "\n".join(part for part in (where, detail) if part)
        return ConfigError(title, text, hint, file=self.file, line=self.line, key=key, nearest=near)
