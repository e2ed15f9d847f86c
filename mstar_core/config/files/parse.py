"""Parser of deployment files: YAML as plain data, with the line of every value. Used by `load`."""

from __future__ import annotations

import math
from typing import Final

import yaml

from mstar_core.config.located import Located

MOST_BYTES: Final = 1024 * 1024
MOST_DEPTH: Final = 32
MOST_VALUES: Final = 20_000
"""Maximum number of values in a file. YAML anchors can make a small file very large."""

STANDARD: Final = "tag:yaml.org,2002:"
PLAIN_TAGS: Final = {f"{STANDARD}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "binary")}
"""Tags of plain scalars. Times and bytes are refused later, with a message of their own."""


def parse(text: str, file: str) -> Located:
    """Parse YAML and record the line of every value. Raises ConfigError with the line if it is not plain data."""
    top = Located(None, f"{file}:1", file, 1)
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise top.error("the file is too large", "", f"at most {MOST_BYTES} bytes")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise top.error("the file is empty", "", hint="mstarctl config init MODEL writes one")
        return _Composer(loader, file).located(node, "", 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        top.line = (mark.line + 1) if mark else 1
        why, hint = str(error.problem or error.context or ""), "check indentation, colons and brackets at this line"
        raise top.error("the file is not valid YAML", "", why, hint) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise top.error("the file is not valid YAML", "", str(error)) from error
    finally:
        loader.dispose()


class _Composer:
    """Turns the nodes of one file into values with their lines."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self._loader = loader
        self._file = file
        self._left = MOST_VALUES

    def located(self, node: yaml.Node, key: str, depth: int) -> Located:
        place = self._place(node)
        self._left -= 1
        if depth > MOST_DEPTH or self._left < 0:
            hint = "write the values out without anchors"
            raise place.error(f"{key or 'the file'} nests or repeats too much", key, hint=hint)
        self._check_tag(node, key, place)
        if isinstance(node, yaml.MappingNode):
            place.value = self._mapping(node, key, depth)
        elif isinstance(node, yaml.SequenceNode):
            place.value = [self.located(item, f"{key}.{index}", depth + 1) for index, item in enumerate(node.value)]
        else:
            value = place.value = self._loader.construct_object(node)
            if isinstance(value, float) and not math.isfinite(value):
                raise place.error(f"{key} is {node.value}", key, hint="write a finite number")
            if not (value is None or isinstance(value, str | int | float | bool)):
                raise place.error(f"{key} is a {type(value).__name__}", key, hint="put quotes around text")
        return place

    def _check_tag(self, node: yaml.Node, key: str, place: Located) -> None:
        """Raise ConfigError for a tag: values are plain data."""
        match node:
            case yaml.MappingNode():
                plain = {f"{STANDARD}map"}
            case yaml.SequenceNode():
                plain = {f"{STANDARD}seq"}
            case _:
                plain = PLAIN_TAGS
        if node.tag not in plain:
            tag = node.tag.replace(STANDARD, "!!")
            hint = "remove the tag; values are plain data"
            raise place.error(f"{key or 'the file'} has the tag {tag}", key, hint=hint)

    def _place(self, node: yaml.Node) -> Located:
        line = node.start_mark.line + 1
        return Located(None, f"{self._file}:{line}", self._file, line)

    def _mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Located]:
        values: dict[str, Located] = {}
        for name_node, value_node in node.value:
            place = self._place(name_node)
            is_plain = isinstance(name_node, yaml.ScalarNode) and name_node.tag != f"{STANDARD}merge"
            if is_plain:
                self._check_tag(name_node, f"{key}.{name_node.value}" if key else str(name_node.value), place)
            name = self._loader.construct_object(name_node) if is_plain else None
            path = f"{key}.{name}" if key else str(name)
            if not isinstance(name, str):
                written = getattr(name_node, "value", "")
                shown = written if isinstance(written, str) else type(name_node).__name__
                hint = "keys must be plain words; merge keys are not supported"
                raise place.error(f"key {shown!r} is not a string", shown, hint=hint)
            if name in values:
                first = f"first on line {values[name].line}"
                raise place.error(f"key {path!r} is repeated", path, first, "keep one of them")
            place.value = self.located(value_node, path, depth + 1).value
            values[name] = place
        return values
