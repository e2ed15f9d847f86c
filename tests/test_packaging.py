"""Distributions of this repository: versions, pins, entry points, wheels, licences and dependencies."""

from __future__ import annotations

import importlib
import re
import runpy
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import mstar_core

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
DISTRIBUTIONS = [ROOT, *PLUGINS]
NOT_OURS = "mstar"
"""Another project owns this distribution name: pip would install its code."""


def name_of(folder: Path) -> str:
    return "mstarctl" if folder == ROOT else folder.name


every_distribution = pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=name_of)
every_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=name_of)


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = pyproject(folder)["project"]
    return table


def requirements(folder: Path) -> list[Requirement]:
    """Return all requirements of a pyproject.toml: build, runtime and extras."""
    table = pyproject(folder)
    extras = table["project"].get("optional-dependencies", {}).values()
    lines = [
        *table["build-system"]["requires"],
        *table["project"].get("dependencies", ()),
        *(line for e in extras for line in e),
    ]
    return [Requirement(line) for line in lines]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def package(folder: Path) -> Path:
    return folder / "src" / folder.name.replace("-", "_")


def data_files(packages: list[Path]) -> set[str]:
    """Return the data files that a wheel must contain, by their names in the wheel."""
    found = (path for each in packages for path in each.rglob("*") if path.is_file())
    names = {
        str(path.relative_to(root_of(path)))
        for path in found
        if path.suffix != ".py" and "__pycache__" not in path.parts
    }
    return {name for name in names if not name.endswith(".pyc")}


def root_of(path: Path) -> Path:
    return next((p for p in path.parents if p.name == "src" and p.is_relative_to(ROOT / "plugins")), ROOT)


@every_plugin
def test_the_lists_of_families_in_root_files_name_every_plugin(folder: Path) -> None:
    """Lists that their formats want written out. All others are derived from the folder `plugins`."""
    name, module = folder.name, package(folder).name
    missing = [where for where, entry, text in root_lists(name, module) if entry not in text]
    assert not missing, f"add {name} (its module {module}, its folder plugins/{name}/src) to: {'; '.join(missing)}"


def root_lists(name: str, module: str) -> list[tuple[str, str, Any]]:
    """Return the lists of families in root files: place, entry of a plugin, list."""
    tool, source = pyproject(ROOT)["tool"], f"plugins/{name}/src"
    contracts = tool["importlinter"]["contracts"]
    linter = [
        (f"importlinter, contract {contract['name']!r}", module, contract.get(key, []))
        for contract in contracts
        for key in ("modules", "source_modules", "forbidden_modules")
        if any(each.startswith("mstar_") and not each.startswith("mstar_core") for each in contract.get(key, []))
    ]
    images = re.findall(r'^ARG PLUGINS="(.*)"$', (ROOT / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
    return [
        ("pytest pythonpath", source, tool["pytest"]["ini_options"]["pythonpath"]),
        ("ruff known-first-party", module, tool["ruff"]["lint"]["isort"]["known-first-party"]),
        ("mypy files", source, tool["mypy"]["files"]),
        ("mypy_path", f"$MYPY_CONFIG_FILE_DIR/{source}", tool["mypy"]["mypy_path"].split(":")),
        ("importlinter root_packages", module, tool["importlinter"]["root_packages"]),
        *linter,
        *(("ARG PLUGINS of Containerfile", name, listed.split()) for listed in images),
        ("docs/index.md", f"(../plugins/{name}/README.md)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")),
    ]


def test_a_plugin_that_no_list_names_is_told_where_to_add() -> None:
    missing = [where for where, entry, text in root_lists("mstar-unlisted", "mstar_unlisted") if entry not in text]
    assert len(missing) >= 9 and "mypy_path" in missing


@every_distribution
def test_what_is_installed_has_the_version_of_the_source(folder: Path) -> None:
    stated = project(folder).get("version", mstar_core.__version__)
    assert metadata.version(name_of(folder)) == stated, "make install"


def test_the_root_version_is_written_once() -> None:
    assert "version" not in project(ROOT)
    assert pyproject(ROOT)["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mstar_core.version.__version__"}
    assert str(Version(mstar_core.__version__)) == mstar_core.__version__


@every_plugin
def test_a_plugins_pin_admits_the_root_and_ends_before_the_next_minor(folder: Path) -> None:
    (pin,) = [need for need in requirements(folder) if need.name == "mstarctl"]
    now = Version(mstar_core.__version__)
    assert "runtime" in pin.extras
    assert pin.specifier.contains(now, prereleases=True)
    assert not pin.specifier.contains(f"{now.major}.{now.minor + 1}.0")


@every_plugin
def test_a_plugin_is_named_once_and_by_the_right_name(folder: Path) -> None:
    module = f"{package(folder).name}.plugin"
    ((name, target),) = project(folder)["entry-points"]["mstar.plugins"].items()
    assert target == module and name.replace("_", "") == folder.name.removeprefix("mstar-")
    installed = [point for point in metadata.distribution(folder.name).entry_points if point.group == "mstar.plugins"]
    assert [(point.name, point.value) for point in installed] == [(name, module)]


@pytest.mark.parametrize("folder", [each for each in PLUGINS if (package(each) / "plugin.py").is_file()], ids=name_of)
def test_an_entry_point_resolves_to_a_plugin(folder: Path) -> None:
    (point,) = [point for point in metadata.distribution(folder.name).entry_points if point.group == "mstar.plugins"]
    module = importlib.import_module(point.value)
    assert isinstance(module.PLUGIN_API, int)
    assert callable(module.mstar_models)


def test_the_command_resolves() -> None:
    (point,) = [point for point in metadata.distribution("mstarctl").entry_points if point.group == "console_scripts"]
    assert point.name == "mstarctl"
    assert callable(point.load())


@every_distribution
def test_nothing_depends_on_the_distribution_of_a_stranger(folder: Path) -> None:
    assert NOT_OURS not in {canonicalize_name(need.name) for need in requirements(folder)}
    assert not re.search(r"""["']mstar(?=["'\[<>=!~ ;])""", (folder / "pyproject.toml").read_text(encoding="utf-8"))


@every_distribution
def test_every_dependency_says_why_it_is_there(folder: Path) -> None:
    """Each dependency has a comment with its reason and its bounds."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    for need in requirements(folder):
        line = next(line for line in text.splitlines() if re.search(rf'"{re.escape(need.name)}(\[|[<>=])', line))
        assert "#" in line, f"{line.strip()}: no reason"


@every_distribution
def test_a_licence_goes_with_every_distribution(folder: Path) -> None:
    assert project(folder)["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@every_distribution
def test_every_distribution_has_a_readme_and_a_changelog(folder: Path) -> None:
    assert f"# {name_of(folder)}\n" in (folder / "README.md").read_text(encoding="utf-8")
    assert "## Unreleased" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")


@every_distribution
def test_constraints_lie_inside_the_bounds(folder: Path) -> None:
    pins = pinned()
    for need in requirements(folder):
        name = canonicalize_name(need.name)
        if name in pins:
            assert need.specifier.contains(pins[name]), f"{need} against {pins[name]}"


def test_everything_that_is_installed_for_tests_is_pinned() -> None:
    """Only av is not pinned: its newest release depends on the Python version. GPU extras are not installed."""
    extras = project(ROOT)["optional-dependencies"]
    lines = [*project(ROOT)["dependencies"], *extras["runtime"], *extras["ray"], *extras["dev"]]
    asked = {canonicalize_name(Requirement(line).name) for line in lines}
    assert asked - set(pinned()) == {"av"}


def test_every_wheel_builds_and_holds_its_data(tmp_path: Path) -> None:
    """Installs without network. A data file missing in package-data would be missing in every installation."""
    wheels = runpy.run_path(str(ROOT / "scripts" / "wheels.py"))
    wheels["build"](tmp_path, wheels["sources"]())
    built = {path.name.split("-")[0]: path for path in tmp_path.glob("*.whl")}
    assert set(built) == {name_of(folder).replace("-", "_") for folder in DISTRIBUTIONS}
    for folder in DISTRIBUTIONS:
        packages = [ROOT / "mstarctl", ROOT / "mstar_core"] if folder == ROOT else [package(folder)]
        inside = set(zipfile.ZipFile(built[name_of(folder).replace("-", "_")]).namelist())
        wanted = data_files(packages)
        assert any(name.endswith("py.typed") for name in wanted)
        assert wanted - inside == set()
        assert not [name for name in inside if name.startswith(("tests/", "scripts/", "plugins/"))]
        assert [name for name in inside if name.endswith("licenses/LICENSE")]
