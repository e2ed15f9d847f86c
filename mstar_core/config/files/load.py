"""Lookup and reading of deployment files by path, shipped name or model name. Used by `up` and `config`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.config.files.parse import MOST_BYTES, parse
from mstar_core.config.located import Located
from mstar_core.config.regular_file import read_regular
from mstar_core.errors import ConfigError, NotFound, PluginError, did_you_mean, nearest
from mstar_core.plugin import ModelSpec

SUFFIXES: Final = (".yaml", ".yml")
VARIANTS: Final = ("tiny", "mini")
"""`MODEL:tiny` selects the embedded checkpoint with random weights, `MODEL:mini` the trained miniature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A deployment file. shown: its name in messages. root: its values with their lines."""

    shown: str
    root: Located
    path: Path | None = None

    @property
    def model(self) -> str:
        """The model that the file names. Raises ConfigError if it names none."""
        if not isinstance(self.root.value, dict):
            raise self.root.error("the file must contain a mapping", "", hint="begin with model: NAME")
        place = self.root.value.get("model")
        if place is None:
            raise self.root.error("key 'model' is missing", "model", hint="add model: NAME")
        if not isinstance(place.value, str):
            raise place.error(f"model is {place.value!r}", "model", hint="it must be the name of a model")
        return place.value


def split_name(text: str) -> tuple[str, str]:
    """Split `orpheus:tiny` into ("orpheus", "tiny"). Raises NotFound for another word after the colon."""
    name, colon, variant = text.partition(":")
    if colon and variant not in VARIANTS:
        near = nearest(variant, VARIANTS)
        hint = did_you_mean(variant, VARIANTS) if near else f"write {name} or {name}:{VARIANTS[0]}"
        raise NotFound(f"{name} has no variant {variant!r}", hint=hint, kind="model", name=text)
    return name, variant


def read_text(text: str, shown: str) -> ConfigFile:
    """Parse a deployment file from text. Raises ConfigError."""
    return ConfigFile(shown=shown, root=parse(text, shown))


def read_file(path: Path) -> ConfigFile:
    """Read a deployment file. Raises ConfigError if it cannot be read or is not YAML."""
    shown = _shown(path)
    hint = "mstarctl models ls lists models and their files; mstarctl config init MODEL FILE writes one"
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "a deployment file is YAML; --weights takes a folder of weights"
        raise ConfigError("the file is not UTF-8 text", str(error), hint, file=shown, line=1, key="") from error
    except IsADirectoryError as error:
        hint = f"give a YAML file, or --weights {shown} if it contains weights"
        raise ConfigError(f"{shown} is a directory, not a deployment file", "", hint, file=shown, key="") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{shown} cannot be read", why, hint, file=shown, line=None, key="") from error
    return ConfigFile(shown=shown, root=parse(text, shown), path=path)


def _shown(path: Path) -> str:
    try:
        short = path.resolve().relative_to(Path.cwd())
        return str(path) if short == Path() else str(short)
    except (ValueError, OSError):
        return str(path)


def shipped(spec: ModelSpec) -> dict[str, Path]:
    """Return the files that a plugin ships for `spec`, by stem."""
    if not spec.configs:
        return {}
    folders = [folder for folder in config_folders(spec) if folder.is_dir()]
    return {path.stem: path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES}


def config_folders(spec: ModelSpec) -> tuple[Path, ...]:
    """Return the folders of a plugin's files: `configs` of the spec names them inside its package."""
    package, _, folder = spec.configs.partition(":")
    return tuple(Path(root) / folder for root in getattr(importlib.import_module(package), "__path__", []))


def default_config(spec: ModelSpec, variant: str = "") -> ConfigFile:
    """Return the default file of a model, or of its miniature. Raises PluginError if the plugin does not ship it."""
    files = shipped(spec)
    stem = (variant == "mini" and spec.mini_config or spec.default_config).removesuffix(".yaml")
    if stem not in files:
        hint = did_you_mean(stem, files) if files else f"write a file: mstarctl config init {spec.name}"
        looked = f"searched {', '.join(map(str, config_folders(spec)))}" if spec.configs else "it ships none"
        raise PluginError(f"{spec.name} ships no default configuration {stem!r}", looked, hint, plugin=spec.plugin)
    return read_file(files[stem])
