"""The JSON form of a spec, and its check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import PluginError
from mstar_core.plugin import ModelSpec
from mstar_core.plugin.conformance import CHECKS, Subject, run_check
from mstar_core.plugin.json_form import spec_to_json
from mstar_core.plugin.loader import PluginEntry
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
