"""Typed front of the plugin system: one method per hook, and models by name. The only caller of pluggy's hooks."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from mstar_core.errors import MstarError, NotFound, PluginError, did_you_mean, nearest
from mstar_core.plugin.loader import (
    Loaded,
    PluginEntry,
    Problem,
    Trace,
    find_entry,
    load,
    new_manager,
    plugin_entries,
    trace_of,
)
from mstar_core.plugin.offers import Check, PlanRequest, WorkloadSpec
from mstar_core.plugin.spec import ModelSpec

if TYPE_CHECKING:
    from mstar_core.config.deployment import Plan
    from mstar_core.config.resolved import ResolvedConfig

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Plugins:
    """Installed plugins of one process. Made by `discover`. failures: number of hooks that raised, by plugin."""

    loaded: tuple[Loaded, ...]
    manager: pluggy.PluginManager
    failures: Counter[str] = field(default_factory=Counter)

    @classmethod
    def discover(
        cls, entries: Sequence[PluginEntry] | None = None, environment: Mapping[str, str] | None = None
    ) -> Plugins:
        """Load every installed plugin that MSTAR_PLUGINS allows.

        Raises PluginError for a name in MSTAR_PLUGINS that is not installed, and for any problem when
        MSTAR_PLUGINS_STRICT is 1.
        """
        settings = os.environ if environment is None else environment
        known = plugin_entries() if entries is None else tuple(entries)
        allowed = _allowed_names(known, settings)
        trace = trace_of(settings)
        manager = new_manager()
        if trace is not None:
            _trace_calls(manager, trace)
        loaded = tuple(_load_allowed(entry, allowed, manager, trace) for entry in known)
        plugins = cls(loaded, manager)
        problems = plugins.problems()
        if problems and settings.get("MSTAR_PLUGINS_STRICT", "") == "1":
            raise problems[0].error()
        return plugins

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems of all plugins that cannot be used."""
        return tuple(item.problem for item in self.loaded if item.problem is not None)

    def plugin(self, name: str) -> Loaded:
        """Return the plugin called `name` (entry or distribution). Raises NotFound with the nearest name."""
        for item in self.loaded:
            if name in (item.entry.name, item.entry.distribution):
                return item
        known = [item.entry.name for item in self.loaded]
        raise NotFound(f"no plugin {name!r} is installed", hint=did_you_mean(name, known), kind="plugin", name=name)

    def models(self) -> tuple[ModelSpec, ...]:
        """Return all models with a unique name, sorted by name."""
        specs = [spec for item in self.loaded for spec in item.models]
        offers = Counter(spec.name for spec in specs)
        return tuple(sorted((spec for spec in specs if offers[spec.name] == 1), key=lambda spec: spec.name))

    def clashes(self) -> dict[str, tuple[str, ...]]:
        """Map each model name that several plugins offer to its unambiguous `dist/model` names."""
        offers: dict[str, list[str]] = {}
        for item in self.loaded:
            for spec in item.models:
                offers.setdefault(spec.name, []).append(f"{item.entry.distribution}/{spec.name}")
        return {name: tuple(full) for name, full in offers.items() if len(full) > 1}

    def model(self, name: str) -> ModelSpec:
        """Return the model called `name`: its name, an alias, or `dist/model`.

        Raises PluginError if several plugins offer it or its plugin cannot be used, NotFound with the nearest name.
        """
        distribution, _, short = name.rpartition("/")
        pairs = [
            (item, spec)
            for item in self.loaded
            for spec in item.models
            if short in (spec.name, *spec.aliases) and distribution in ("", item.entry.distribution, item.entry.name)
        ]
        exact = [pair for pair in pairs if pair[1].name == short] or pairs
        if len(exact) == 1:
            return exact[0][1]
        if exact:
            full = [f"{item.entry.distribution}/{spec.name}" for item, spec in exact]
            raise PluginError(
                f"{len(exact)} plugins offer model {name!r}", ", ".join(full), f"use its full name, such as {full[0]!r}"
            )
        raise self._missing(name, short)

    def distribution_of(self, spec: ModelSpec) -> PluginEntry:
        """Return the plugin that offers `spec`."""
        return next(item.entry for item in self.loaded if any(offer is spec for offer in item.models))

    def _missing(self, name: str, short: str) -> MstarError:
        for item in self.loaded:
            related = short in (item.entry.name, item.entry.distribution) or short.startswith(item.entry.name)
            if related and item.problem is not None:
                return item.problem.error()
            if related and item.is_disabled:
                return PluginError(
                    f"plugin {item.entry.name!r} is disabled",
                    hint=f"add {item.entry.name} to MSTAR_PLUGINS",
                    plugin=item.entry.name,
                )
        known = [other for spec in self.models() for other in (spec.name, *spec.aliases)]
        hint = did_you_mean(name, known) if known else "install a plugin: pip install mstar-orpheus"
        return NotFound(f"no model {name!r}", hint=hint, kind="model", name=name, nearest=nearest(name, known))

    def plan(self, model: ModelSpec, config: ResolvedConfig, devices: Sequence[str]) -> Plan:
        """Return the placement of a model: its plugin's own, else the default planner's. Raises as `make_plan`."""
        call: Callable[..., Plan | None] = self.manager.hook.mstar_plan
        request = PlanRequest(config=config, devices=tuple(devices))
        from mstar_core.config.files.placement import make_plan  # here, because most commands plan nothing

        placement: Plan | None = None
        try:
            placement = call(model=model, request=request)
        except Exception as error:  # noqa: BLE001  the isolation boundary of a plugin's hook
            self._count("mstar_plan", error)
        return make_plan(model, config, devices, placement)

    def workloads(self, model: ModelSpec) -> tuple[WorkloadSpec, ...]:
        """Return the load-test workloads of a model. An exception of a hook propagates to the caller."""
        return tuple(spec for offer in self.manager.hook.mstar_workloads(model=model) for spec in offer)

    def doctor(self) -> tuple[Check, ...]:
        """Return the findings of every plugin. A hook that raises becomes a failed finding."""
        checks: list[Check] = []
        for item in self.loaded:
            if item.module is None:
                continue
            calls = self.manager.subset_hook_caller(
                "mstar_doctor", [m.module for m in self.loaded if m.module not in (None, item.module)]
            )
            try:
                checks += [check for offer in calls() for check in offer]
            except Exception as error:  # noqa: BLE001  the isolation boundary of a plugin's hook
                self._count("mstar_doctor", error)
                checks.append(
                    Check(
                        name=f"plugin {item.entry.name}",
                        state="failed",
                        detail=f"mstar_doctor raised {type(error).__name__}: {error}",
                    )
                )
        return tuple(checks)

    def _count(self, hook: str, error: Exception) -> None:
        name = self._culprit(error)
        self.failures[f"{name}.{hook}"] += 1
        log.warning("plugin %s: %s raised %s: %s; the default is used", name, hook, type(error).__name__, error)

    def _culprit(self, error: Exception) -> str:
        frame = error.__traceback__
        files = set()
        while frame is not None:
            files.add(frame.tb_frame.f_code.co_filename)
            frame = frame.tb_next
        return next(
            (i.entry.name for i in self.loaded if i.module is not None and i.module.__file__ in files), "unknown"
        )


def _allowed_names(
    entries: tuple[PluginEntry, ...], environment: Mapping[str, str] | None = None
) -> frozenset[str] | None:
    """Return the names in MSTAR_PLUGINS, None if it is unset. Raises PluginError for a name that is not installed."""
    text = (os.environ if environment is None else environment).get("MSTAR_PLUGINS")
    if text is None:
        return None
    names = frozenset(part.strip() for part in text.split(",") if part.strip())
    for name in sorted(names):
        try:
            find_entry(name, entries)
        except NotFound as error:
            raise PluginError(f"MSTAR_PLUGINS: {error.title}", hint=error.hint, plugin=name) from None
    return names


def _load_allowed(
    entry: PluginEntry, allowed: frozenset[str] | None, manager: pluggy.PluginManager, trace: Trace | None
) -> Loaded:
    if allowed is not None and not allowed.intersection((entry.name, entry.distribution)):
        return Loaded(entry=entry, is_disabled=True)
    return load(entry, manager, trace=trace)


def _trace_calls(manager: pluggy.PluginManager, trace: Trace) -> None:
    def before(hook_name: str, impls: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        names = ", ".join(impl.plugin_name for impl in impls)
        trace(
            f"call {hook_name}({', '.join(f'{k}={_short(v)}' for k, v in arguments.items())}) in {names or 'no plugin'}"
        )

    def after(outcome: Any, hook_name: str, impls: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        trace(f"done {hook_name} -> {_short(outcome.exception or outcome.get_result())}")

    manager.add_hookcall_monitoring(before, after)


def _short(value: Any) -> str:
    name = getattr(value, "name", None)
    text = f"{type(value).__name__} {name}" if isinstance(name, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
