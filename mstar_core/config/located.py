"""YAML values with their file and line. Made by `load`, validated by `read`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

from mstar_core.errors import ConfigError

MOST_BYTES: Final = 1024 * 1024
MOST_DEPTH: Final = 32
MOST_VALUES: Final = 20_000
"""Maximum number of values in a file. YAML anchors can make a small file very large."""


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
        """Return a ConfigError at this position."""
        return config_error(title, key, self.file, self.line, self.source, detail, hint)


def config_error(
    title: str, key: str, file: str | None, line: int | None, source: str, detail: str = "", hint: str = ""
) -> ConfigError:
    """Return a ConfigError that names the key and its file and line, or its flag."""
    near = hint.removeprefix("did you mean '").removesuffix("'?") if hint.startswith("did you mean") else None
    where = "" if file else f"from {source}"
    return ConfigError(
        title, "\n".join(part for part in (where, detail) if part), hint, file=file, line=line, key=key, nearest=near
    )


def parse(text: str, file: str) -> Located:
    """Parse YAML and record the line of every value. Raises ConfigError with the line if it is not plain data."""
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise ConfigError("the file is too large", f"at most {MOST_BYTES} bytes", file=file, line=1, key="")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(
                "the file is empty", hint="mstarctl config init MODEL writes one", file=file, line=1, key=""
            )
        count = iter(range(MOST_VALUES))
        return _located(loader, node, file, "", 0, count)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            "the file is not valid YAML",
            str(error.problem or error.context or ""),
            file=file,
            line=(mark.line + 1) if mark else 1,
            key="",
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError("the file is not valid YAML", str(error), file=file, line=1, key="") from error
    finally:
        loader.dispose()


def parse_scalar(text: str) -> Any:
    """Parse a YAML value, for `--set`. Raises ConfigError."""
    return parse(text, "--set").plain() if text.strip() else ""


def _located(
    loader: yaml.SafeLoader, node: yaml.Node, file: str, key: str, depth: int, count: Iterator[int]
) -> Located:
    line = node.start_mark.line + 1
    if depth > MOST_DEPTH or next(count, None) is None:
        raise ConfigError(
            f"{key or 'the file'} nests or repeats too much",
            hint="write the values out without anchors",
            file=file,
            line=line,
            key=key,
        )
    value: Any
    if isinstance(node, yaml.MappingNode):
        value = _mapping(loader, node, file, key, depth, count)
    elif isinstance(node, yaml.SequenceNode):
        value = [
            _located(loader, item, file, f"{key}.{index}", depth + 1, count) for index, item in enumerate(node.value)
        ]
    else:
        value = loader.construct_object(node)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} is {node.value}", hint="write a finite number", file=file, line=line, key=key)
        if not (value is None or isinstance(value, str | int | float | bool)):
            raise ConfigError(
                f"{key} is a {type(value).__name__}", hint="put quotes around text", file=file, line=line, key=key
            )
    return Located(value, f"{file}:{line}", file, line)


def _mapping(
    loader: yaml.SafeLoader, node: yaml.MappingNode, file: str, key: str, depth: int, count: Iterator[int]
) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for name_node, value_node in node.value:
        line = name_node.start_mark.line + 1
        name = (
            loader.construct_object(name_node)
            if isinstance(name_node, yaml.ScalarNode) and name_node.tag != "tag:yaml.org,2002:merge"
            else None
        )
        path = f"{key}.{name}" if key else str(name)
        if not isinstance(name, str):
            written = getattr(name_node, "value", "")
            shown = written if isinstance(written, str) else type(name_node).__name__
            raise ConfigError(
                f"key {shown!r} is not a string",
                hint="keys must be plain words; merge keys are not supported",
                file=file,
                line=line,
                key=shown,
            )
        if name in found:
            raise ConfigError(
                f"key {path!r} is repeated",
                f"first on line {found[name].line}",
                "keep one of them",
                file=file,
                line=line,
                key=path,
            )
        item = _located(loader, value_node, file, path, depth + 1, count)
        found[name] = Located(item.value, f"{file}:{line}", file, line)
    return found
