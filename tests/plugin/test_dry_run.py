"""The dry run of the programs of a spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mstar_core.errors import GraphError
from mstar_core.plugin import Fork, ModelSpec, ProgramRequest, Reset, Run
from mstar_core.plugin.check.dry_run import dry_run
from mstar_core.plugin.program import ProgramGenerator
from mstarctl.plugins import Plugins
from tests.plugin.test_json_form import with_program
from tests.plugin.toy import entries, install


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    install(monkeypatch, tmp_path)
    return Plugins.discover(entries("toy"), {}).model("toy")


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


def warm(request: ProgramRequest) -> ProgramGenerator:
    yield Run("prefill", tokens=(1, 2), sampling={"temprature": 0.5})


def curious(request: ProgramRequest) -> ProgramGenerator:
    yield Reset("cfg")
    answer = yield Run("prefill", tokens=(1, 2), reads=("token",))
    assert answer.values["token"] == (0,)
    yield Run("prefill", tokens=(1, 2), reads=("tokn",))


def lost(request: ProgramRequest) -> ProgramGenerator:
    yield Reset("cfgg")


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
        (warm, "sets sampling 'temprature'"),
        (curious, "reads port 'tokn'"),
        (lost, "Reset names cache branch 'cfgg'"),
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
