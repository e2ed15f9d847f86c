"""Runtime checks: each finds its flaw in a toy model that otherwise passes all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar_core.conformance.light import _check_key_map
from mstar_core.errors import PluginError
from mstar_core.plugin.conformance import CHECKS, CheckResult, ConformanceCheck, KeyMap, Subject, run_check
from mstar_core.plugin.loader import PluginEntry
from mstar_core.plugin.spec import ModelSpec, Partition
from tests.conformance import flawed

RUNTIME = [
    check
    for check in CHECKS
    if not check.target.startswith("mstar_core.conformance.light") and check.grade != "gold"  # it has no reference
]
ENTRY = PluginEntry(name="flawless", target=flawed.HERE, distribution="mstar-flawless", version="0.1.0")


def run(name: str, spec: ModelSpec) -> CheckResult:
    check = next(check for check in CHECKS if check.name == name)
    return run_check(check, Subject(entry=ENTRY, models=(spec,), spec=spec))


def with_part(**changes: Any) -> ModelSpec:
    targets = {key: f"{flawed.HERE}:{value}" if isinstance(value, str) else value for key, value in changes.items()}
    return replace(flawed.GOOD, **targets)


@pytest.mark.parametrize("check", RUNTIME, ids=lambda check: check.name)
def test_the_flawless_toy_passes(check: ConformanceCheck) -> None:
    assert run(check.name, flawed.GOOD).detail == ""


def test_a_node_that_warms_itself_up_passes() -> None:
    assert run("warm-ups-run", with_part(model="WarmModel")).outcome == "passed"


UNTAKEN = Partition(name="main", program=flawed.program, walks=flawed.OTHER_WALK)


@pytest.mark.parametrize(
    ("check", "spec", "told"),
    [
        ("serves-every-walk", with_part(partitions=(UNTAKEN,)), "never"),
        ("serves-every-walk", with_part(tiny="write_nothing"), "return the folder"),
        ("outputs-as-declared", with_part(model="FloatModel"), "f32"),
        ("outputs-as-declared", with_part(processor="WrongRate"), "44100"),
        ("ports-as-declared", with_part(model="FloatModel"), "'pcm' as f32[1,11]; declared is i16[samples]"),
        ("ports-as-declared", with_part(model="ForgetfulModel"), "no 'pcm', which an edge takes; it returned sound"),
        (
            "warm-ups-run",
            with_part(model="BatchedWarmUpModel"),
            "warm-up 'a text' of node tone gives 'tokens' as i64[1,3]; declared is i64[n]",
        ),
        ("warm-ups-run", with_part(model="FloatWarmUpModel"), "gives 'tokens' as f32[3]; declared is i64[n]"),
        (
            "warm-ups-run",
            with_part(model="GreedyWarmUpModel"),
            "warm-up 'a text' of node tone failed: node tone returned",
        ),
        (
            "warm-ups-run",
            with_part(model="CrashingWarmUpModel"),
            "the warm-up of node tone failed: ValueError: no such",
        ),
        ("same-seed", with_part(model="ChanceModel"), "audio differs"),
        ("batch-equal", with_part(model="NeighbourModel"), "differs"),
        ("stream-joined", with_part(processor="HeaderOnEachChunk"), "not the whole answer"),
        ("malformed-inputs", with_part(processor="TakesAnything"), "is accepted"),
        ("malformed-inputs", with_part(processor="Crashes"), "AssertionError"),
        ("malformed-inputs", with_part(processor="NamesNoField"), "names field ''"),
    ],
)
def test_a_flaw_is_found(check: str, spec: ModelSpec, told: str) -> None:
    result = run(check, spec)
    assert result.outcome == "failed"
    assert told in result.detail


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (replace(flawed.GOOD, model=None, processor=None), "no model code"),
        (replace(flawed.GOOD, tiny=None), "no tiny checkpoint"),
    ],
)
def test_what_cannot_be_served_is_skipped_by_name(spec: ModelSpec, told: str) -> None:
    result = run("serves-every-walk", spec)
    assert (result.outcome, told in result.detail) == ("skipped", True)


def test_a_model_without_a_reference_is_not_gold() -> None:
    result = run("reference", flawed.GOOD)
    assert result.outcome == "skipped" and "reference(folder, request)" in result.detail


def test_published_weights_without_a_key_map_are_skipped_by_name() -> None:
    result = run("key-map", replace(flawed.GOOD, weights=flawed.WEIGHTS))
    assert result.outcome == "skipped" and "key_map" in result.detail


@pytest.mark.parametrize(
    ("targets", "places", "told"),
    [
        ({"a": "x", "b": "y"}, {"x"}, "y has no parameter"),
        ({"a": "x", "b": None}, {"x", "z"}, "parameter z has no tensor"),
    ],
)
def test_a_key_map_must_fit_both_ways(targets: dict[str, str | None], places: set[str], told: str) -> None:
    with pytest.raises(PluginError, match=told):
        _check_key_map("all", KeyMap(targets=targets, places=frozenset(places)))
