"""Stage 1 of loading: imports one plugin's light module and checks it. Every failure stays that plugin's own."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Final

import pluggy

from mstar_core.errors import PluginError, did_you_mean
from mstar_core.plugin import hookspecs
from mstar_core.plugin.entries import PluginEntry, find_entry
from mstar_core.plugin.problem import Phase, Problem
from mstar_core.plugin.spec import API_VERSION, ModelSpec
from mstar_core.plugin.spec_check import require_sound

HEAVY: Final = ("torch", "transformers", "numpy", "flashinfer", "safetensors", "PIL", "soundfile", "av")
"""Modules that no light module may import; each costs every command its time."""

Trace = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What became of one plugin. module is None when it is not registered; heavy: modules that its import pulled in."""

    entry: PluginEntry
    module: ModuleType | None = None
    models: tuple[ModelSpec, ...] = ()
    problem: Problem | None = None
    heavy: tuple[str, ...] = ()
    import_s: float = 0.0
    is_disabled: bool = False

    @property
    def state(self) -> str:
        """`ok`, `disabled`, `broken`, `incompatible` or `invalid`."""
        if self.problem is not None:
            return self.problem.state
        return "disabled" if self.is_disabled else "ok"

    @property
    def text(self) -> str:
        """The state with its cause, one line."""
        if self.problem is not None:
            return self.problem.text
        return f"ok (heavy: {', '.join(self.heavy)}, {self.import_s:.1f} s)" if self.heavy else self.state


def new_manager() -> pluggy.PluginManager:
    """A manager that knows our hooks and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load(entry: PluginEntry, manager: pluggy.PluginManager, *, trace: Trace | None = None) -> Loaded:
    """Import, check and register one plugin. A failure is part of the answer, never raised."""
    before, started = set(sys.modules), time.perf_counter()
    phase: Phase = "requirement"
    module: ModuleType | None = None
    models: tuple[ModelSpec, ...] = ()
    problem: Problem | None = None
    try:
        check_requirement(entry)
        phase = "import"
        imported = import_target(entry.target)
        phase = "api"
        check_api(imported, entry)
        phase = "hooks"
        check_hooks(imported, entry)
        phase = "models"
        offered = offered_models(imported)
        phase = "spec"
        models = validated(offered, entry)
        manager.register(imported, name=_registered_name(entry))  # last, so that there is nothing to undo
        module = imported
    except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin's failure is that plugin's state, not ours
        problem, models = Problem.of(error, entry, phase), ()
    spent = time.perf_counter() - started
    heavy = tuple(name for name in HEAVY if name in sys.modules and name not in before)
    loaded = Loaded(entry=entry, module=module, models=models, problem=problem, heavy=heavy, import_s=spent)
    if trace is not None:
        trace(f"import {entry.target} ({entry.distribution} {entry.version}) {spent * 1000:.1f} ms: {loaded.text}")
    return loaded


def _registered_name(entry: PluginEntry) -> str:
    return f"{entry.distribution}/{entry.name}"


def import_target(target: str) -> ModuleType:
    """The module that an entry point names."""
    return importlib.import_module(target.partition(":")[0])


def check_requirement(entry: PluginEntry, installed: str | None = None) -> None:
    """Re-read the pin on mstarctl, which `pip install --no-deps` skips. Raises PluginError when it is unmet."""
    from packaging.requirements import Requirement

    version = installed or own_version()
    if version is None:
        return  # run from a folder that was never installed: there is no version to hold the pin against
    for line in entry.requires:
        need = Requirement(line)
        if (
            need.name.lower().replace("_", "-") != "mstarctl"
            or need.marker is not None
            and not need.marker.evaluate({"extra": ""})
        ):
            continue
        if not need.specifier.contains(version, prereleases=True):
            hint = f"pip install --upgrade {entry.distribution} 'mstarctl{need.specifier}'"
            raise PluginError(f"needs mstarctl{need.specifier}, this is {version}", hint=hint, plugin=entry.name)


def own_version() -> str | None:
    """The installed version of mstarctl, None when it was never installed."""
    try:
        return metadata.version("mstarctl")
    except metadata.PackageNotFoundError:
        return None


def check_api(module: ModuleType, entry: PluginEntry) -> None:
    """Compare the plugin's PLUGIN_API with ours. Raises PluginError when the majors differ."""
    stated = getattr(module, "PLUGIN_API", None)
    if stated == API_VERSION and not isinstance(stated, bool):
        return
    hint = f"pip install --upgrade {entry.distribution} mstarctl"
    if stated is None:
        raise PluginError(
            "states no PLUGIN_API", hint=f"write PLUGIN_API = {API_VERSION} in {entry.target}", plugin=entry.name
        )
    raise PluginError(f"needs plugin API {stated}, this is {API_VERSION}", hint=hint, plugin=entry.name)


def check_hooks(module: ModuleType, entry: PluginEntry) -> None:
    """Refuse hooks that we do not call and arguments that we do not pass. Raises PluginError.

    In a throwaway manager: pluggy keeps a plugin whose hooks it refused.
    """
    known = [hook.__name__ for hook in hookspecs.HOOKS]
    marker = f"{hookspecs.PROJECT}_impl"
    for name, value in vars(module).items():
        if not name.startswith("mstar_") or not callable(value) or getattr(value, "__module__", "") != module.__name__:
            continue
        if name not in known:
            raise PluginError(f"unknown hook {name!r}", hint=did_you_mean(name, known), plugin=entry.name)
        if not hasattr(value, marker):
            raise PluginError(f"{name} is not marked", hint="put @hookimpl above it", plugin=entry.name)
    manager = new_manager()
    manager.register(module)
    manager.check_pending()


def offered_models(module: ModuleType) -> tuple[object, ...]:
    """What the plugin's mstar_models gives, unchecked; nothing when it has none."""
    manager = new_manager()
    manager.register(module)
    return tuple(spec for offer in manager.hook.mstar_models() for spec in offer)


def validated(offered: tuple[object, ...], entry: PluginEntry) -> tuple[ModelSpec, ...]:
    """The specs, checked. Raises PluginError with the first thing that is wrong."""
    specs: list[ModelSpec] = []
    for spec in offered:
        if not isinstance(spec, ModelSpec):
            raise PluginError(
                f"mstar_models gives a {type(spec).__name__}", hint="give a sequence of ModelSpec", plugin=entry.name
            )
        if spec.plugin != entry.name:
            hint = f"write plugin={entry.name!r}, the name of the entry point"
            raise PluginError(f"model {spec.name!r} says it is of plugin {spec.plugin!r}", hint=hint, plugin=entry.name)
        specs.append(spec)
    require_sound(specs)
    return tuple(specs)


def load_plugin(name: str) -> tuple[ModelSpec, ...]:
    """Load one plugin alone, as children do: no other plugin is imported.

    Raises NotFound when it is not installed, PluginError when it cannot be used.
    """
    loaded = load(find_entry(name), new_manager(), trace=trace_of(os.environ))
    if loaded.problem is not None:
        raise loaded.problem.error()
    return loaded.models


def trace_of(environment: Mapping[str, str]) -> Trace | None:
    """Where MSTAR_TRACE_PLUGINS writes: stderr, or nowhere when it is not set."""
    if environment.get("MSTAR_TRACE_PLUGINS", "") in ("", "0"):
        return None
    return lambda line: print(f"plugins: {line}", file=sys.stderr, flush=True)
