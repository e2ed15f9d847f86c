"""New plugins of each shape: written, installed, and subject to the checks of every plugin."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar_core.errors import UsageError
from mstarctl.authoring.checks import grade_of, run_checks
from mstarctl.authoring.scaffold import write_plugin
from mstarctl.main import run

SHAPES = [("stateless", 1), ("stateless", 3), ("kv", 1), ("kv", 2)]


@pytest.fixture
def loaded_by_name() -> Iterator[None]:
    """Unload the modules of a new plugin after its test."""
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name not in before and name.startswith("mstar_new")]:
        del sys.modules[name]


def installed(home: Path) -> None:
    """Write the metadata that pip would install: requirements and the entry point."""
    project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = home / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    lines = [f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {line}" for line in project["dependencies"]]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
    points = project["entry-points"]["mstar.plugins"]
    lines = ["[mstar.plugins]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.usefixtures("loaded_by_name")
@pytest.mark.parametrize(("engine", "partitions"), SHAPES, ids=[f"{engine}-{count}" for engine, count in SHAPES])
def test_a_fresh_plugin_passes_every_check(
    engine: str, partitions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"new-{engine}-{partitions}"
    write_plugin(f"mstar-{name}", tmp_path / "home", engine=engine, partitions=partitions)
    installed(tmp_path / "home")
    monkeypatch.syspath_prepend(str(tmp_path / "home" / "src"))
    results = run_checks(name.replace("-", "_"))
    assert {result.name: result.detail for result in results if result.outcome != "passed"} == {}
    assert grade_of(results) == "silver"


@pytest.mark.parametrize(
    ("engine", "partitions", "told"), [("kw", 1, "kv, stateless"), ("kv", 0, "1 to"), ("kv", 9, "1 to")]
)
def test_a_shape_that_cannot_be_made_is_refused(engine: str, partitions: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        write_plugin("mstar-new", tmp_path / "home", engine=engine, partitions=partitions)
    assert not (tmp_path / "home").exists()


def test_the_command_writes_the_shape_that_is_asked_for(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run(["plugins", "new", "mstar-new", str(home), "--engine", "kv", "--partitions", "2"]) == 0
    text = (home / "src" / "mstar_new" / "plugin.py").read_text(encoding="utf-8")
    assert "engine=KV_CACHE" in text and "turner_2" in text and "turner_3" not in text
    assert run(["plugins", "new", "mstar-other", str(tmp_path / "other"), "--engine", "paged"]) == 2
