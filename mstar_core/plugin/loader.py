"""Loading of plugins: package metadata, the import of a light module, its checks, and the cause of a failure."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import pluggy

from mstar_core.errors import MstarError, NotFound, PluginError, did_you_mean
from mstar_core.plugin import hookspecs
from mstar_core.plugin.check.spec_check import require_sound
from mstar_core.plugin.spec import API_VERSION, ModelSpec

GROUP: Final = "mstar.plugins"
"""Entry point group of plugins. An entry names the module with the plugin's hooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginEntry:
    """Metadata of one installed plugin. target: "pkg.module". requires: requirement lines."""

    name: str
    target: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()


def plugin_entries() -> tuple[PluginEntry, ...]:
    """Return all installed plugins by name. Reads metadata only and imports no plugin."""
    entries: dict[tuple[str, str], PluginEntry] = {}
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        entry = PluginEntry(
            name=point.name,
            target=point.value,
            distribution=dist.name if dist is not None else "unknown",
            version=dist.version if dist is not None else "0",
            requires=tuple(dist.requires or ()) if dist is not None else (),
        )
        entries.setdefault((entry.name, entry.distribution), entry)
    return tuple(sorted(entries.values(), key=lambda entry: (entry.name, entry.distribution)))


def find_entry(name: str, entries: tuple[PluginEntry, ...] | None = None) -> PluginEntry:
    """Return the plugin called `name` (entry or distribution). Raises NotFound with the nearest name."""
    known = plugin_entries() if entries is None else entries
    for entry in known:
        if name in (entry.name, entry.distribution):
            return entry
    hint = did_you_mean(name, [entry.name for entry in known])
    raise NotFound(f"no plugin {name!r} is installed", hint=hint, kind="plugin", name=name)


State = Literal["broken", "incompatible", "invalid"]
Phase = Literal["requirement", "import", "api", "hooks", "models", "spec"]
_STATES: dict[str, State] = {
    "requirement": "incompatible",
    "api": "incompatible",
    "import": "broken",
    "models": "broken",
    "hooks": "invalid",
    "spec": "invalid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Failure of one plugin. place: `plugin.py:3`; file: the same with the full path; trace: the traceback."""

    plugin: str
    distribution: str
    phase: Phase
    cause: str
    place: str = ""
    file: str = ""
    detail: str = ""
    hint: str = ""
    trace: str = ""

    @property
    def state(self) -> State:
        return _STATES[self.phase]

    @property
    def text(self) -> str:
        """One line for tables: `broken: ModuleNotFoundError: No module named 'librosa' (plugin.py:3)`."""
        hint = f"; {self.hint}" if self.hint else ""
        place = f" ({self.place})" if self.place else ""
        return f"{self.state}: {self.cause}{hint}{place}"

    @classmethod
    def of(cls, error: BaseException, entry: PluginEntry, phase: Phase) -> Problem:
        """Describe the exception that stopped the plugin in `phase`."""
        file, line = _where(error, entry)
        place = f"{Path(file).name}:{line}" if file else ""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, MstarError):
            cause, detail, hint = error.title, error.detail, error.hint
        else:
            cause, detail, hint = _cause(error), "", _hint(error, entry)
        return cls(
            plugin=entry.name,
            distribution=entry.distribution,
            phase=phase,
            cause=cause,
            place=place,
            file=f"{file}:{line}" if file else "",
            detail=detail,
            hint=hint,
            trace=trace,
        )

    def error(self) -> PluginError:
        """Return the error for a caller that needs this plugin."""
        facts = {"plugin": self.plugin, "distribution": self.distribution, "phase": self.phase}
        detail = "\n".join(
            part
            for part in (f"{self.state}: {self.cause}", f"in {self.file}" if self.file else "", self.detail)
            if part
        )
        return PluginError(f"plugin {self.plugin!r} cannot be used", detail, self.hint, **facts)


def _cause(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code} while it was imported"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hint(error: BaseException, entry: PluginEntry) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the dependencies of {entry.distribution}: pip install {entry.distribution}"
    return ""


def _where(error: BaseException, entry: PluginEntry) -> tuple[str, int]:
    # The deepest line in the plugin's own files is more useful to its author than the import machinery below it.
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    package = entry.target.split(":")[0].split(".")[0]
    own = [frame for frame in frames if package in Path(frame.filename).parts]
    if not own:
        return "", 0
    return own[-1].filename, own[-1].lineno or 1


HEAVY: Final = ("torch", "transformers", "numpy", "flashinfer", "safetensors", "PIL", "soundfile", "av")
"""Modules that no light module may import, since every command would pay for them."""

Trace = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Result of loading one plugin. module: None if it is not registered. heavy: heavy modules that it imported."""

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
        """State and cause in one line."""
        if self.problem is not None:
            return self.problem.text
        return f"ok (heavy: {', '.join(self.heavy)}, {self.import_s:.1f} s)" if self.heavy else self.state


def new_manager() -> pluggy.PluginManager:
    """Return a pluggy manager with our hook specifications and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load(entry: PluginEntry, manager: pluggy.PluginManager, *, trace: Trace | None = None) -> Loaded:
    """Import, check and register one plugin. A failure is returned, never raised."""
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
        manager.register(
            imported, name=f"{entry.distribution}/{entry.name}"
        )  # last, so that a failure leaves nothing to undo
        module = imported
    except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin's failure is that plugin's state, not ours
        problem, models = Problem.of(error, entry, phase), ()
    spent = time.perf_counter() - started
    heavy = tuple(name for name in HEAVY if name in sys.modules and name not in before)
    loaded = Loaded(entry=entry, module=module, models=models, problem=problem, heavy=heavy, import_s=spent)
    if trace is not None:
        trace(f"import {entry.target} ({entry.distribution} {entry.version}) {spent * 1000:.1f} ms: {loaded.text}")
    return loaded


def import_target(target: str) -> ModuleType:
    """Import the module that an entry point names."""
    return importlib.import_module(target.partition(":")[0])


def check_requirement(entry: PluginEntry) -> None:
    """Check the requirement on mstarctl, which `pip install --no-deps` skips. Raises PluginError if it is not met."""
    from packaging.requirements import Requirement

    version = own_version()
    if version is None:
        return  # mstarctl runs from a source folder that was never installed
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
            raise PluginError(f"needs mstarctl{need.specifier}, installed is {version}", hint=hint, plugin=entry.name)


def own_version() -> str | None:
    """Return the installed version of mstarctl, None if it is not installed."""
    try:
        return metadata.version("mstarctl")
    except metadata.PackageNotFoundError:
        return None


def check_api(module: ModuleType, entry: PluginEntry) -> None:
    """Compare the plugin's PLUGIN_API with ours. Raises PluginError if they differ."""
    stated = getattr(module, "PLUGIN_API", None)
    if stated == API_VERSION and not isinstance(stated, bool):
        return
    hint = f"pip install --upgrade {entry.distribution} mstarctl"
    if stated is None:
        raise PluginError(
            "PLUGIN_API is missing", hint=f"write PLUGIN_API = {API_VERSION} in {entry.target}", plugin=entry.name
        )
    raise PluginError(f"needs plugin API {stated}, this is {API_VERSION}", hint=hint, plugin=entry.name)


def check_hooks(module: ModuleType, entry: PluginEntry) -> None:
    """Refuse unknown hooks and unknown hook arguments. Raises PluginError.

    The check uses a temporary manager, since pluggy keeps a plugin whose hooks it refused.
    """
    known = [hook.__name__ for hook in hookspecs.HOOKS]
    marker = f"{hookspecs.PROJECT}_impl"
    for name, value in vars(module).items():
        if not name.startswith("mstar_") or not callable(value) or getattr(value, "__module__", "") != module.__name__:
            continue
        if name not in known:
            raise PluginError(f"unknown hook {name!r}", hint=did_you_mean(name, known), plugin=entry.name)
        if not hasattr(value, marker):
            raise PluginError(f"{name} lacks the hook marker", hint="decorate it with @hookimpl", plugin=entry.name)
    manager = new_manager()
    manager.register(module)
    manager.check_pending()


def offered_models(module: ModuleType) -> tuple[object, ...]:
    """Return the unchecked result of the plugin's mstar_models hook, empty without one."""
    manager = new_manager()
    manager.register(module)
    return tuple(spec for offer in manager.hook.mstar_models() for spec in offer)


def validated(offered: tuple[object, ...], entry: PluginEntry) -> tuple[ModelSpec, ...]:
    """Return the specs after validation. Raises PluginError with the first problem."""
    specs: list[ModelSpec] = []
    for spec in offered:
        if not isinstance(spec, ModelSpec):
            raise PluginError(
                f"mstar_models returns a {type(spec).__name__}",
                hint="return a sequence of ModelSpec",
                plugin=entry.name,
            )
        if spec.plugin != entry.name:
            hint = f"write plugin={entry.name!r}, the name of the entry point"
            raise PluginError(f"model {spec.name!r} names plugin {spec.plugin!r}", hint=hint, plugin=entry.name)
        specs.append(spec)
    require_sound(specs)
    return tuple(specs)


def load_plugin(name: str) -> tuple[ModelSpec, ...]:
    """Load one plugin without importing any other, as child processes do.

    Raises NotFound if it is not installed, PluginError if it cannot be used.
    """
    loaded = load(find_entry(name), new_manager(), trace=trace_of(os.environ))
    if loaded.problem is not None:
        raise loaded.problem.error()
    return loaded.models


def trace_of(environment: Mapping[str, str]) -> Trace | None:
    """Return the trace function that MSTAR_TRACE_PLUGINS asks for: to stderr, or None if it is unset."""
    if environment.get("MSTAR_TRACE_PLUGINS", "") in ("", "0"):
        return None
    return lambda line: print(f"plugins: {line}", file=sys.stderr, flush=True)


def served_model(plugin: str, model: str) -> ModelSpec:
    """Return the model called `model` of the plugin called `plugin`. Raises PluginError."""
    models = {spec.name: spec for spec in load_plugin(plugin)}
    if model not in models:
        raise PluginError(
            f"plugin {plugin!r} offers no model {model!r}", hint=did_you_mean(model, models), plugin=plugin
        )
    return models[model]


def bound_model(plugin: str, model: str, folder: str | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Return the served model, adapted to its checkpoint folder and the deployment's model_kwargs."""
    return served_model(plugin, model).bound(Path(folder) if folder else None, model_kwargs)
