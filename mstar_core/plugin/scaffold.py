"""Writes a new plugin from the template: a working byte-level toy. Used by `mstarctl plugins new`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Final

from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstar_core.plugin.scaffold_shapes import ENGINES, MOST_PARTITIONS, Shape

TEMPLATE: Final = Path(__file__).parent / "template"
SUFFIX: Final = ".tmpl"
_NAME: Final = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)+$")
_TAKEN: Final = frozenset({"mstar", "mstarctl", "mstar-core"})


def write_plugin(name: str, folder: Path, *, engine: str = ENGINES[0], partitions: int = 1) -> tuple[Path, ...]:
    """Write the distribution `name` into `folder` and give the files written.

    engine: of its first node, `stateless` or `kv`. partitions: the first and the stages behind it, joined by streams.
    Raises UsageError for a name or a shape that is not usable or a folder that is not empty, ConfigError when writing
    fails.
    """
    shape = shape_of(engine, partitions)
    words = {**template_words(name), **shape.words()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", hint="name a new folder")
    written = []
    try:
        for source in sorted(TEMPLATE.rglob(f"*{SUFFIX}")):
            part, *rest = source.relative_to(TEMPLATE).parts
            if part not in ("common", shape.engine):
                continue
            relative = "/".join(rest).removesuffix(SUFFIX).replace("package_", words["package"])
            target = folder / relative.replace("model_", words["model"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(source.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written", error.strerror or str(error), file=str(folder), key=""
        ) from error
    return tuple(written)


def shape_of(engine: str, partitions: int) -> Shape:
    """What a new plugin shall look like. Raises UsageError with what there is to choose from."""
    known = next((each for each in ENGINES if each == engine), None)
    if known is None:
        raise UsageError(f"there is no engine {engine!r}", hint=did_you_mean(engine, ENGINES))
    if not 1 <= partitions <= MOST_PARTITIONS:
        raise UsageError(f"{partitions} partitions cannot be made", hint=f"1 to {MOST_PARTITIONS}")
    return Shape(engine=known, partitions=partitions)


def template_words(name: str) -> dict[str, str]:
    """The words that the template takes. Raises UsageError for a name that no distribution should have."""
    if name in _TAKEN:
        raise UsageError(f"the name {name!r} is taken by another distribution", hint="choose a name such as mstar-foo")
    if not _NAME.match(name):
        raise UsageError(f"{name!r} is no usable name", hint="lower case words joined by -, such as mstar-foo")
    model = name.removeprefix("mstar-").replace("-", "_")
    major, minor = _own_version()
    words = {
        "distribution": name,
        "package": name.replace("-", "_"),
        "model": model,
        "title": model.replace("_", " ").capitalize(),
    }
    return {
        **words,
        "class_name": "".join(part.capitalize() for part in model.split("_")),
        "pin": f">={major}.{minor},<{major}.{minor + 1}",
    }


def _own_version() -> tuple[int, int]:
    try:
        major, minor, *_ = metadata.version("mstarctl").split(".")
    except metadata.PackageNotFoundError:
        return 0, 1
    return int(major), int(minor)
