"""The wheelhouse's lock holds every package that the project needs at run time and the target's image lacks."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.fakes.script import script

ROOT = Path(__file__).resolve().parents[2]
TARGET = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}
EXTRAS = ("runtime", "cuda", "realtime")
"""Extras of the project that the wheelhouse can hold."""

wheelhouse: Any = script("wheelhouse")
PINS: dict[str, Any] = {canonicalize_name(pin.name): pin for pin in wheelhouse.locked()}


def declared() -> Iterator[Requirement]:
    """Yield the run-time requirements of the project and its plugins, except those on the project itself."""
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        optional = project.get("optional-dependencies", {})
        extras = [line for extra in EXTRAS for line in optional.get(extra, ())]
        yield from needed([*project["dependencies"], *extras])


def needed(lines: Iterable[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        is_needed = requirement.marker is None or requirement.marker.evaluate(TARGET)
        if is_needed and canonicalize_name(requirement.name) != "mstarctl":
            yield requirement


def missing(requirements: Iterable[Requirement]) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements} - PINS.keys() - wheelhouse.GIVEN


def test_every_run_time_dependency_is_in_the_lock_or_in_the_image() -> None:
    assert missing(declared()) == set(), "add to scripts/wheelhouse.lock"


@pytest.mark.parametrize("name", [name for name, pin in PINS.items() if pin.group != "test"])
def test_so_is_every_dependency_of_a_pinned_package(name: str) -> None:
    """Read from the package as installed here, because the wheel is not."""
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        pytest.skip(f"runs when {name} is installed")
    assert missing(needed(lines)) == set(), "add to scripts/wheelhouse.lock"


def test_pins_are_within_the_declared_bounds() -> None:
    wrong = [
        str(each)
        for each in declared()
        if (pin := PINS.get(canonicalize_name(each.name))) is not None and pin.version not in each.specifier
    ]
    assert not wrong


def test_pins_are_the_versions_that_the_tests_run_with() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    versions = {canonicalize_name(name): version for name, version in tested.items()}
    pinned = {name: pin.version for name, pin in PINS.items() if name in versions and pin.group != "test"}
    assert pinned and pinned == {name: versions[name] for name in pinned}


def test_large_groups_are_left_out_unless_asked_for() -> None:
    none = argparse.Namespace(**dict.fromkeys(wheelhouse.OPTIONAL.values(), False))
    groups = {pin.group for pin in wheelhouse.chosen(PINS.values(), none)}
    assert {"server", "gateway"} <= groups and not groups & wheelhouse.OPTIONAL.keys()
    none.realtime = True
    added = {pin.group for pin in wheelhouse.chosen(PINS.values(), none)} - groups
    assert added == {"realtime"}


def test_trained_weights_of_every_plugin_stay_out_of_the_wheels() -> None:
    folders = wheelhouse.miniatures()
    weights = [
        path.relative_to(path.parents[path.parts[::-1].index("src") - 1])
        for path in sorted(ROOT.glob("plugins/*/src/**/*.safetensors"))
    ]
    assert weights and all(path.as_posix().startswith(folders) for path in weights)
