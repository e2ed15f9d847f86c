"""The JSON form and the dry run of a spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import GraphError, PluginError
from mstar_core.plugin import Fork, ModelSpec, ProgramRequest, Run, Sample
from mstar_core.plugin.check.dry_run import dry_run
from mstar_core.plugin.check.spec_check import check_spec
from mstar_core.plugin.conformance import CHECKS, Subject, run_check
from mstar_core.plugin.json_form import spec_to_json
from mstar_core.plugin.loader import PluginEntry
from mstar_core.plugin.program import ProgramGenerator
from mstarctl.plugins import Plugins
from tests.plugin.toy import entries, install


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    install(monkeypatch, tmp_path)
    return Plugins.discover(entries("toy"), {}).model("toy")


def copied(spec: ModelSpec) -> type[Any]:
    """Return a parameter class whose name imports another class."""
    return type(spec.params.__name__, (spec.params,), {"__module__": spec.params.__module__})


def with_program(spec: ModelSpec, program: object) -> ModelSpec:
    first, *rest = spec.partitions
    return replace(spec, partitions=(replace(first, program=program), *rest))  # type: ignore[arg-type]


def test_json_keeps_every_value_of_an_installed_spec() -> None:
    for model in Plugins.discover(environment={}).models():
        form = spec_to_json(model)
        assert json.loads(json.dumps(form)) == form
        assert [node["name"] for node in form["nodes"]] == [node.name for node in model.nodes]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_kwargs": {"sizes": {1: 2}}}, "changes model_kwargs"),
        ({"model_kwargs": {"scale": object()}}, "has no JSON form"),
        ({"params": copied}, "is another object"),
    ],
)
def test_a_value_that_json_does_not_keep_fails_the_check(spec: ModelSpec, change: dict[str, Any], cause: str) -> None:
    (check,) = (check for check in CHECKS if check.name == "json-form")
    entry = PluginEntry(name="toy", target="toy_plugin", distribution="mstar-toy", version="0.1.0")
    change = {name: value(spec) if callable(value) else value for name, value in change.items()}
    result = run_check(check, Subject(entry=entry, models=(spec,), spec=replace(spec, **change)))
    assert result.outcome == "failed" and cause in result.detail


def test_a_program_without_a_name_has_no_json_form(spec: ModelSpec) -> None:
    with pytest.raises(PluginError, match="no importable name"):
        spec_to_json(with_program(spec, lambda request: iter(())))


def test_a_dry_run_tells_the_walks_of_the_partitions_that_the_sample_starts(spec: ModelSpec) -> None:
    assert dry_run(spec, spec.samples[0]) == {"LLM": ["prefill", "guided", "decode"], "VOC": ["chunk"]}
    silent = replace(spec.samples[0], outputs=frozenset())
    assert dry_run(spec, silent) == {"LLM": ["prefill", "guided", "decode"]}


def forked(request: ProgramRequest) -> ProgramGenerator:
    yield Fork("main", into="cfgg")


def unlimited(request: ProgramRequest) -> ProgramGenerator:
    yield Run("guided", max_iters={"decode_lop": 1}, tokens=request.inputs["tokens"])


def hungry(request: ProgramRequest) -> ProgramGenerator:
    yield Run("prefill")


def numbers(request: ProgramRequest) -> ProgramGenerator:
    yield Run("prefill", tokens=[1, 2])  # type: ignore[arg-type]


def endless(request: ProgramRequest) -> ProgramGenerator:
    while True:
        yield Run("decode", max_iters=1)


def failing(request: ProgramRequest) -> ProgramGenerator:
    yield Run("prefill", tokens=request.inputs["tokns"])


def forgetful(request: ProgramRequest) -> ProgramGenerator:
    result = yield Run("prefill", tokens=request.inputs["tokens"])
    yield Run("prefill", tokens=result.signals["token"])


def keeping(request: ProgramRequest) -> ProgramGenerator:
    yield Run("prefill", tokens=request.inputs["tokens"], keep=("tokn",))


def plain(request: ProgramRequest) -> list[Run]:
    return [Run("prefill")]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (forked, "cache branch 'cfgg'"),
        (unlimited, "limits loop 'decode_lop'"),
        (hungry, "lacks input 'tokens'"),
        (numbers, "input 'tokens' is a list"),
        (endless, "does not end"),
        (failing, "raised KeyError"),
        (forgetful, "raised KeyError"),
        (keeping, "keeps port 'tokn'"),
        (plain, "is not a generator"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_an_error_with_its_place(spec: ModelSpec, program: object, said: str) -> None:
    with pytest.raises(GraphError) as caught:
        dry_run(with_program(spec, program), spec.samples[0])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"routes": frozenset({"speach"})}, "maps route 'speach'"),
        ({"walk_aliases": {"old": "prefil"}}, "names walk 'prefil'"),
        ({"processor": "toy_plugin.processor"}, "processor is"),
        ({"outputs": ()}, "emits audio"),
        ({"aliases": ("Toy!",)}, "'Toy!' is invalid"),
        ({"aliases": ("toy",)}, "two model names called 'toy'"),
        ({"samples": (Sample(name="x", params={"temprature": 1}),)}, "unknown parameter 'temprature'"),
    ],
)
def test_a_spec_that_contradicts_itself_is_told(spec: ModelSpec, change: dict[str, object], said: str) -> None:
    errors = check_spec(replace(spec, **change))
    assert any(said in str(error) for error in errors), errors


@pytest.mark.parametrize(("field", "kind"), [("nodes", "nodes"), ("streams", "streams"), ("partitions", "walks")])
def test_names_are_given_once(spec: ModelSpec, field: str, kind: str) -> None:
    first = getattr(spec, field)[0]
    errors = check_spec(replace(spec, **{field: (*getattr(spec, field), first)}))  # type: ignore[arg-type]
    assert any(f"has two {kind} called" in str(error) for error in errors), errors


def test_a_sound_spec_has_no_errors(spec: ModelSpec) -> None:
    assert check_spec(spec) == []
