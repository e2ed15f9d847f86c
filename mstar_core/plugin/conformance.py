"""Conformance of a plugin: a registry of checks, their grades, and how they are run. Used by `plugins check`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.entries import PluginEntry, find_entry
from mstar_core.plugin.loader import load_plugin
from mstar_core.plugin.spec import ModelSpec

Grade = Literal["bronze", "silver", "gold"]
GRADES: Final[tuple[Grade, ...]] = ("bronze", "silver", "gold")
Outcome = Literal["passed", "failed", "skipped"]


class CheckSkipped(Exception):
    """A check cannot be made here (no model code, no weights, no GPU). Its text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """How one set of published weights becomes a model's, by names alone.

    A plugin that has one offers `key_map() -> Mapping[str, KeyMap]`, by weight set, in the module `published` beside
    its model. targets: published name -> place in the model, None for what is left out on purpose. places: every
    name in the model at its official size.
    """

    targets: Mapping[str, str | None]
    places: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked: a plugin, and one of its models for checks of a model."""

    entry: PluginEntry
    models: tuple[ModelSpec, ...] = ()
    spec: ModelSpec | None = None

    @property
    def model(self) -> ModelSpec:
        """The model of a check that has one."""
        if self.spec is None:
            raise PluginError(
                f"plugin {self.entry.name!r} offers no model", hint="give one from mstar_models", plugin=self.entry.name
            )
        return self.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCheck:
    """One check. target: "pkg.mod:function", called with a Subject; it raises when the plugin fails."""

    name: str
    grade: Grade
    target: str
    doc: str
    is_per_model: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one check ended for one model ("" for checks of the whole plugin)."""

    check: ConformanceCheck
    outcome: Outcome
    model: str = ""
    detail: str = ""
    error: BaseException | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.check.name

    def facts(self) -> dict[str, Any]:
        """Plain data for `-o json`."""
        return {
            "name": self.name,
            "grade": self.check.grade,
            "outcome": self.outcome,
            "model": self.model,
            "detail": self.detail,
            "doc": self.check.doc,
        }


_LIGHT: Final = "mstar_core.plugin.bronze"
_RUNTIME: Final = "mstar_core.conformance"
"""Checks that serve a miniature. Named and not imported: they need torch, which this package must not load."""

CHECKS: Final[tuple[ConformanceCheck, ...]] = (
    ConformanceCheck(
        name="light-import",
        grade="bronze",
        target=f"{_LIGHT}:light_import",
        doc="plugin.py loads the standard library and mstar_core only",
        is_per_model=False,
    ),
    ConformanceCheck(
        name="pins",
        grade="bronze",
        target=f"{_LIGHT}:pins",
        doc="the pin on mstarctl has both bounds and admits this version; PLUGIN_API fits",
        is_per_model=False,
    ),
    ConformanceCheck(
        name="offers-models",
        grade="bronze",
        target=f"{_LIGHT}:offers_models",
        doc="mstar_models gives at least one model",
        is_per_model=False,
    ),
    ConformanceCheck(
        name="spec",
        grade="bronze",
        target=f"{_LIGHT}:spec_is_sound",
        doc="names, graph and parameters contradict nothing",
    ),
    ConformanceCheck(
        name="json-form", grade="bronze", target=f"{_LIGHT}:json_form", doc="the spec survives its JSON form"
    ),
    ConformanceCheck(
        name="programs",
        grade="bronze",
        target=f"{_LIGHT}:programs",
        doc="programs run dry on every sample and the samples reach every walk",
    ),
    ConformanceCheck(
        name="params",
        grade="bronze",
        target=f"{_LIGHT}:params",
        doc="defaults are valid, values outside a range and unknown names are refused",
    ),
    ConformanceCheck(
        name="configs",
        grade="bronze",
        target=f"{_LIGHT}:configs",
        doc="every shipped configuration validates and plans",
    ),
    ConformanceCheck(
        name="targets",
        grade="bronze",
        target=f"{_LIGHT}:targets",
        doc="processor and model point to modules that exist",
    ),
    ConformanceCheck(
        name="serves-every-walk",
        grade="bronze",
        target=f"{_RUNTIME}.serving:serves_every_walk",
        doc="a miniature serves every walk on the CPU",
    ),
    ConformanceCheck(
        name="outputs-as-declared",
        grade="bronze",
        target=f"{_RUNTIME}.serving:outputs_as_declared",
        doc="outputs have the declared type, rate and shape",
    ),
    ConformanceCheck(
        name="same-seed",
        grade="silver",
        target=f"{_RUNTIME}.equality:same_seed",
        doc="the same seed gives the same bytes",
    ),
    ConformanceCheck(
        name="batch-equal",
        grade="silver",
        target=f"{_RUNTIME}.equality:batch_equal",
        doc="a request among others gives what it gives alone",
    ),
    ConformanceCheck(
        name="chunked-prefill",
        grade="silver",
        target=f"{_RUNTIME}.equality:chunked_prefill",
        doc="a prompt read in pieces gives what it gives as a whole",
    ),
    ConformanceCheck(
        name="stream-joined",
        grade="silver",
        target=f"{_RUNTIME}.equality:stream_joined",
        doc="the chunks of a stream joined are the whole answer",
    ),
    ConformanceCheck(
        name="cancel-anywhere",
        grade="silver",
        target=f"{_RUNTIME}.endings:cancel_anywhere",
        doc="a cancel at any step frees every page, slot, handle and stream",
    ),
    ConformanceCheck(
        name="deadline",
        grade="silver",
        target=f"{_RUNTIME}.endings:deadline",
        doc="a deadline ends a request with its cause and leaves its neighbours unharmed",
    ),
    ConformanceCheck(
        name="failing-node",
        grade="silver",
        target=f"{_RUNTIME}.endings:failing_node",
        doc="a failing node ends its request with its cause and leaves its neighbours unharmed",
    ),
    ConformanceCheck(
        name="eight-at-once",
        grade="silver",
        target=f"{_RUNTIME}.endings:eight_at_once",
        doc="eight mixed requests for fewer places all end",
    ),
    ConformanceCheck(
        name="malformed-inputs",
        grade="silver",
        target=f"{_RUNTIME}.refusals:malformed_inputs",
        doc="malformed inputs are refused with the name of their field",
    ),
    ConformanceCheck(
        name="key-map",
        grade="silver",
        target=f"{_RUNTIME}.keys:key_map",
        doc="every published weight has a place in the model or is left out on purpose, and no place stays empty",
    ),
)


def subjects(check: ConformanceCheck, entry: PluginEntry, models: tuple[ModelSpec, ...]) -> tuple[Subject, ...]:
    """What a check is run on: every model, or the plugin once."""
    if check.is_per_model:
        return tuple(Subject(entry=entry, models=models, spec=spec) for spec in models)
    return (Subject(entry=entry, models=models),)


def run_check(check: ConformanceCheck, subject: Subject) -> Result:
    """Run one check. A failure is part of the answer, never raised."""
    model = "" if subject.spec is None else subject.spec.name
    try:
        function(check)(subject)
    except CheckSkipped as reason:
        return Result(check=check, outcome="skipped", model=model, detail=str(reason))
    except Exception as error:  # noqa: BLE001  the isolation boundary of one check
        text = str(error) if isinstance(error, MstarError | AssertionError) else f"{type(error).__name__}: {error}"
        return Result(check=check, outcome="failed", model=model, detail=text, error=error)
    return Result(check=check, outcome="passed", model=model)


def function(check: ConformanceCheck) -> Callable[[Subject], None]:
    """The check's function. Raises CheckSkipped when this installation does not hold it."""
    module, _, name = check.target.partition(":")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CheckSkipped(f"{error.name} is not installed here") from error
    found: Callable[[Subject], None] = getattr(holder, name)
    return found


def run_checks(name: str, checks: Sequence[ConformanceCheck] = CHECKS) -> tuple[Result, ...]:
    """Every check on the plugin called `name` and each of its models. Raises when it cannot be loaded."""
    entry = find_entry(name)
    models = load_plugin(entry.name)
    return tuple(run_check(check, subject) for check in checks for subject in subjects(check, entry, models))


def grade_of(results: Sequence[Result]) -> Grade | None:
    """The highest grade whose checks, and all below, passed; what was skipped does not count. None below bronze."""
    reached: Grade | None = None
    for grade in GRADES:
        of_grade = [result for result in results if result.check.grade == grade]
        if not of_grade or any(result.outcome != "passed" for result in of_grade):
            break
        reached = grade
    return reached
