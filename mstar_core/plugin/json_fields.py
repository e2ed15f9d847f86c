"""Values of a checkpoint's JSON files, with errors that name file and key. Used by plugins to read sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

DAMAGED: Final = "download this file again"


class JsonFields:
    """Values of a JSON object. path: its file; prefix: of its keys in errors, for an object inside another."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        """Read a JSON file. Raises WeightsError for a missing or broken one."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            hint = "give --weights the folder of a whole checkpoint"
            raise WeightsError(f"{path} is missing", hint=hint, file=str(path)) from error
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path} cannot be read", str(error), DAMAGED, file=str(path)) from error
        if not isinstance(values, dict):
            raise WeightsError(f"{path} does not hold a JSON object", hint=DAMAGED, file=str(path))
        return cls(path, values)

    @classmethod
    def read_if_any(cls, path: Path) -> JsonFields:
        """Read a JSON file; a missing one has no fields. Raises WeightsError for a broken one."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def part(self, key: str) -> JsonFields:
        """Return the fields of an object in this one; none if it is absent. Raises WeightsError for another value."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object is required")
        return JsonFields(self.path, value, f"{self._prefix}{key}.")

    def completed(self, defaults: Mapping[str, Any]) -> JsonFields:
        """Return these fields with values for those that are absent."""
        return JsonFields(self.path, {**defaults, **self.values}, self._prefix)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; `default` if it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def __getitem__(self, key: str) -> Any:
        """Return a value. Raises WeightsError with the whole dotted name if it is absent."""
        if key not in self.values:
            raise self.error(key)
        return self.values[key]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises WeightsError for another value, and for an absent one without a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer is required")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Raises as `number`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a positive number is required")
        return float(value)

    def error(self, key: str, detail: str = "", hint: str = DAMAGED) -> WeightsError:
        """Return the error of a value."""
        name, value = f"{self._prefix}{key}", self.values.get(key)
        title = f"{self.path} lacks {name}" if value is None else f"{self.path}: {name} is {value!r}"
        return WeightsError(title, detail, hint, file=str(self.path), key=name)
