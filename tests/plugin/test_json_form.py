"""The JSON form and the dry run of a spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mstar_core.errors import GraphError, PluginError
from mstar_core.plugin import Fork, ModelSpec, ProgramRequest, Run, Sample
from mstar_core.plugin.dry_run import dry_run
from mstar_core.plugin.json_form import spec_from_json, spec_to_json
from mstar_core.plugin.program import ProgramGenerator
from mstar_core.plugin.spec_check import check_spec
from mstarctl.plugins import Plugins
from tests.plugin.toy import entries, install


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    install(monkeypatch, tmp_path)
    return Plugins.discover(entries("toy"), {}).model("toy")


def with_program(spec: ModelSpec, program: object) -> ModelSpec:
    first, *rest = spec.partitions
    return replace(spec, partitions=(replace(first, program=program), *rest))  # type: ignore[arg-type]


def test_every_installed_spec_survives_its_json_form() -> None:
    for model in Plugins.discover(environment={}).models():
        text = json.dumps(spec_to_json(model))
        again = spec_from_json(json.loads(text))
        assert json.dumps(spec_to_json(again)) == text
        assert again.nodes == model.nodes
        assert again.partitions == model.partitions


def test_a_program_without_a_name_has_no_json_form(spec: ModelSpec) -> None:
    with pytest.raises(PluginError, match="no importable name"):
        spec_to_json(with_program(spec, lambda request: iter(())))


def test_another_form_version_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(PluginError, match="form 99"):
        spec_from_json({**spec_to_json(spec), "form": 99})


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
