"""Conformance checks of a plugin: registry, grades and runner. Used by `mstarctl plugins check` and the pytest kit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.loader import PluginEntry
from mstar_core.plugin.spec import ModelSpec
from mstar_core.targets import load_target

Grade = Literal["bronze", "silver", "gold"]
GRADES: Final[tuple[Grade, ...]] = ("bronze", "silver", "gold")
Outcome = Literal["passed", "failed", "skipped"]


class CheckSkipped(Exception):
    """Raised by a check that cannot run here (no model code, no weights, no GPU). The text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """Mapping from the names of one set of published weights to the model's parameter names.

    A plugin offers `key_map() -> Mapping[str, KeyMap]`, keyed by weight set, in the module `published` beside its
    model. targets: published name -> parameter name, None for a tensor that is skipped on purpose. places: every
    parameter name of the model at its official size.
    """

    targets: Mapping[str, str | None]
    places: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Subject of a check: a plugin, and one of its models for checks of a model."""

    entry: PluginEntry
    models: tuple[ModelSpec, ...] = ()
    spec: ModelSpec | None = None

    @property
    def model(self) -> ModelSpec:
        """The model to check. Raises PluginError if the plugin offers none."""
        if self.spec is None:
            raise PluginError(
                f"plugin {self.entry.name!r} offers no model", hint="give one from mstar_models", plugin=self.entry.name
            )
        return self.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCheck:
    """One check. target: "pkg.mod:function", called with a Subject; the function raises if the plugin fails."""

    name: str
    grade: Grade
    target: str
    doc: str
    is_per_model: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check. model: "" for checks of the whole plugin."""

    check: ConformanceCheck
    outcome: Outcome
    model: str = ""
    detail: str = ""
    error: BaseException | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.check.name


_PACKAGE: Final = "mstar_core.conformance"
"""Package of the checks. Named and not imported: most need torch, which this package must not load."""

_CHECKS: Final[Mapping[tuple[Grade, str], Mapping[str, str]]] = {
    ("bronze", "light"): {
        "light-import": "plugin.py loads the standard library and mstar_core only",
        "pins": "the pin on mstarctl has both bounds and admits this version; PLUGIN_API fits",
        "offers-models": "mstar_models gives at least one model",
        "spec": "names, graph and parameters contradict nothing",
        "json-form": "the spec survives its JSON form",
        "programs": "programs run dry on every sample and the samples reach every walk",
        "params": "defaults are valid, values outside a range and unknown names are refused",
        "configs": "every shipped configuration validates and plans",
        "targets": "processor and model point to modules that exist",
    },
    ("bronze", "walks"): {
        "serves-every-walk": "a miniature serves every walk on the CPU",
        "outputs-as-declared": "outputs have the declared type, rate and shape",
    },
    ("bronze", "outputs.ports"): {
        "ports-as-declared": "nodes return the ports that edges take, with the declared dtypes and shapes",
    },
    ("bronze", "outputs.warm_ups"): {
        "warm-ups-run": "the warm-up of nodes runs on the CPU, with inputs as their ports declare",
    },
    ("bronze", "people"): {
        "sample-inputs": "the miniature takes the inputs of mstarctl sample, the same each time",
        "raw-prompts": "a model with a route for raw prompts or tokens spells ids as their text and reads both",
    },
    ("silver", "equality"): {
        "same-seed": "the same seed gives the same bytes",
        "batch-equal": "a request among others gives what it gives alone",
        "chunked-prefill": "a prompt read in pieces gives what it gives as a whole",
        "stream-joined": "the chunks of a stream joined are the whole answer",
    },
    ("silver", "endings"): {
        "cancel-anywhere": "a cancel at any step frees every page, slot, handle and stream",
        "deadline": "a deadline ends a request with its cause and leaves its neighbours unharmed",
        "failing-node": "a failing node ends its request with its cause and leaves its neighbours unharmed",
        "eight-at-once": "eight mixed requests for fewer places all end",
    },
    ("silver", "resuming"): {"goes-on": "a request that goes on after a death gives what it would have given"},
    ("silver", "refusals"): {"malformed-inputs": "malformed inputs are refused with the name of their field"},
    ("silver", "light"): {
        "key-map": "every published weight has a place in the model or is left out on purpose, and no place stays empty"
    },
    ("gold", "outputs.gold"): {
        "reference": "answers equal those of the plugin's reference, an independent computation",
        "reference-batched": "so do those of requests of mixed lengths in one batch",
        "reference-chunked": "so do those of prompts that are read in pieces",
        "reference-preempted": "so do those of requests that are preempted in turn, in a cache too small for them",
        "reference-split": "so do those of a model that is split over two ranks",
        "reference-parallel": "so do those of a model whose tensor-parallel nodes two ranks compute together",
    },
}
"""Grade and module -> name -> what the check holds. The function has the same name, with underscores."""

_ONCE: Final = ("light-import", "pins", "offers-models")
"""Checks of the whole plugin. The others run for each of its models."""

CHECKS: Final[tuple[ConformanceCheck, ...]] = tuple(
    ConformanceCheck(
        name=name,
        grade=grade,
        target=f"{_PACKAGE}.{module}:{name.replace('-', '_')}",
        doc=doc,
        is_per_model=name not in _ONCE,
    )
    for (grade, module), checks in _CHECKS.items()
    for name, doc in checks.items()
)


def subjects(check: ConformanceCheck, entry: PluginEntry, models: tuple[ModelSpec, ...]) -> tuple[Subject, ...]:
    """Return the subjects of a check: every model, or the plugin once."""
    if check.is_per_model:
        return tuple(Subject(entry=entry, models=models, spec=spec) for spec in models)
    return (Subject(entry=entry, models=models),)


def run_check(check: ConformanceCheck, subject: Subject) -> CheckResult:
    """Run one check. A failure is returned, never raised."""
    model = "" if subject.spec is None else subject.spec.name
    try:
        function(check)(subject)
    except CheckSkipped as reason:
        return CheckResult(check=check, outcome="skipped", model=model, detail=str(reason))
    except Exception as error:  # noqa: BLE001  the isolation boundary of one check
        text = str(error) if isinstance(error, MstarError | AssertionError) else f"{type(error).__name__}: {error}"
        return CheckResult(check=check, outcome="failed", model=model, detail=text, error=error)
    return CheckResult(check=check, outcome="passed", model=model)


def function(check: ConformanceCheck) -> Callable[[Subject], None]:
    """Import the function of a check. Raises CheckSkipped if a package that it needs is not installed."""
    try:
        check_function: Callable[[Subject], None] = load_target(check.target)
    except ModuleNotFoundError as error:
        raise CheckSkipped(f"{error.name} is not installed here") from error
    return check_function
