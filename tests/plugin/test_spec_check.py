"""The check of a whole spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mstar_core.plugin import ModelSpec, Sample, param
from mstar_core.plugin.check.spec_check import check_spec
from mstarctl.plugins import Plugins
from tests.plugin.toy import entries, install


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Parameters of which one maps a field of a route that does not exist."""

    language: str = param("en", "of the speech", openai="transcriptions:language")


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    install(monkeypatch, tmp_path)
    return Plugins.discover(entries("toy"), {}).model("toy")


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
        ({"params": Elsewhere}, "maps route 'transcriptions'"),
        ({"at_once": "batch_sise"}, "at_once names no parameter: 'batch_sise'"),
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
