"""Configuration that the command line selects: a model or file, with overrides of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mstar_core.config.files.load import SUFFIXES, ConfigFile, default_config, read_file, shipped, split_name
from mstar_core.config.files.parse import parse
from mstar_core.config.files.resolution import resolve
from mstar_core.config.located import Located
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import ConfigError, NotFound, UsageError, did_you_mean, nearest
from mstar_core.plugin import ModelSpec
from mstarctl.plugins import Plugins

LISTED: Final = 12
"""Shipped files that a hint lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model and file that `up MODEL|FILE` selects.

    variant: of the requested embedded checkpoint, such as `tiny`, or empty. why: name of a file that was chosen, and
    the reason.
    """

    spec: ModelSpec
    config: ConfigFile
    variant: str = ""
    why: str = ""


def _all_shipped(specs: Sequence[ModelSpec]) -> Iterator[tuple[str, Path]]:
    for spec in specs:
        yield from shipped(spec).items()


def looks_like_file(text: str) -> bool:
    """Return whether a command-line word is a file rather than a model, which may be called `dist/model`."""
    return text.endswith(SUFFIXES) or text.startswith(("/", "./", "../")) or "/" in text and Path(text).exists()


def named_file(path: Path, layouts: Mapping[str, Path]) -> ConfigFile:
    """Read a file by its path, else by the name of a shipped one, with or without its suffix. Raises ConfigError."""
    stem = path.name.removesuffix(path.suffix) if path.suffix in SUFFIXES else path.name
    if str(path) == path.name and stem in layouts and not path.exists():
        return read_file(layouts[stem])
    if not path.exists() and str(path) == path.name and (len(layouts) <= LISTED or nearest(stem, layouts)):
        raise ConfigError(f"{path} does not exist", hint=did_you_mean(stem, layouts), file=str(path), key="")
    return read_file(path)


def find(text: str, plugins: Plugins) -> Target:
    """Find a target by the name of a model, the name of a shipped file, or a path.

    Raises NotFound with the nearest name, ConfigError for a bad file, PluginError for an unusable plugin.
    """
    layouts = dict(_all_shipped(plugins.models()))
    if looks_like_file(text):
        return _of_file(named_file(Path(text), layouts), plugins, variant="")
    name, variant = split_name(text)
    try:
        spec = plugins.model(name)
        if name in spec.aliases and name in layouts:  # the file's name says more than the model's alias
            return _of_file(read_file(layouts[name]), plugins, variant=variant)
    except NotFound as missing:
        if name in layouts:
            return _of_file(read_file(layouts[name]), plugins, variant=variant)
        hint = (
            did_you_mean(name, layouts) if nearest(name, layouts) and not missing.facts.get("nearest") else missing.hint
        )
        raise NotFound(missing.title, missing.detail, hint, **missing.facts) from None
    return Target(spec=spec, config=default_config(spec, variant), variant=variant)


def _of_file(config: ConfigFile, plugins: Plugins, *, variant: str) -> Target:
    place = config.root.value["model"] if config.model else config.root
    try:
        name, named_variant = split_name(config.model)
        return Target(spec=plugins.model(name), config=config, variant=named_variant or variant)
    except NotFound as error:
        raise place.error(error.title, "model", error.detail, error.hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One value from the command line. key: `kv_cache.pages`, `node_groups.0.ranks`. source: the flag as written."""

    key: str
    value: Any
    source: str


def parse_set(text: str) -> Override:
    """Parse the argument of `--set`: `KEY=VALUE` with a YAML value. Raises UsageError or ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {text!r} must be KEY=VALUE", hint="--set kv_cache.pages=512")
    return Override(
        key=key.strip(), value=parse(value, "--set").plain() if value.strip() else "", source=f"--set {text}"
    )


def apply(root: Located, overrides: Sequence[Override]) -> Located:
    """Return a copy of the tree with the overrides applied in order. Raises ConfigError for a path through a value."""
    result = _copy(root)
    for override in overrides:
        _put(result, override)
    return result


def _put(root: Located, override: Override) -> None:
    place = root
    *path, last = override.key.split(".")
    for word in path:
        place = _step(place, word, override)
    new = wrap(override.value, override.source)
    if isinstance(place.value, list):
        place.value[_index(place, last, override)] = new
    elif isinstance(place.value, dict):
        place.value[last] = new
    else:
        raise new.error(f"{override.key}: its parent must be a section", override.key)


def _step(place: Located, word: str, override: Override) -> Located:
    if isinstance(place.value, list):
        child: Located = place.value[_index(place, word, override)]
        return child
    if not isinstance(place.value, dict):
        raise Located(None, override.source).error(f"{override.key}: {word!r} is below a plain value", override.key)
    step: Located = place.value.setdefault(word, Located({}, override.source))
    return step


def _index(place: Located, word: str, override: Override) -> int:
    count = len(place.value)
    if not word.isdigit() or int(word) >= count:
        hint = f"a number from 0 to {count - 1}" if count else "the list is empty"
        raise Located(None, override.source).error(
            f"{override.key}: {word!r} must be an index of the list", override.key, hint=hint
        )
    return int(word)


def wrap(value: Any, source: str) -> Located:
    """Wrap plain data with one source for all values."""
    if isinstance(value, dict):
        return Located({str(key): wrap(item, source) for key, item in value.items()}, source)
    if isinstance(value, list | tuple):
        return Located([wrap(item, source) for item in value], source)
    return Located(value, source)


def _copy(place: Located) -> Located:
    value = place.value
    if isinstance(value, dict):
        value = {key: _copy(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_copy(item) for item in value]
    return Located(value, place.source, place.file, place.line)


def resolve_with(
    spec: ModelSpec, config: ConfigFile, overrides: Sequence[Override] = (), *, variant: str = ""
) -> ResolvedConfig:
    """Check a file with its overrides against a model. Raises ConfigError with file, line, key and nearest name."""
    return resolve(spec, replace(config, root=apply(config.root, overrides)), variant=variant)


def resolve_target(target: Target, overrides: Sequence[Override] = ()) -> ResolvedConfig:
    """Resolve a target that `find` returned."""
    return resolve_with(target.spec, target.config, overrides, variant=target.variant)
