"""New plugins of each shape: written, installed, and subject to the checks of every plugin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import UsageError
from mstar_core.plugin.conformance import CHECKS, CheckResult, Subject, run_check
from mstar_core.plugin.loader import find_entry, load_plugin
from mstarctl.authoring.checks import grade_of, run_checks
from mstarctl.authoring.scaffold import KINDS, write_plugin
from mstarctl.main import run
from tests import test_packaging as packaging
from tests.fakes.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TOYS = [("stateless", 3), ("kv", 2)]
MASKED = 'GraphNode(lm, ("tokens",), to_client)'
"""The prompt's use of the language model in the shape `llm`."""

UNMASKED = 'GraphNode(lm, ("tokens",), to_client, Attend(mask="full"))'
WAIT_S = 120.0


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


def results_of(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[CheckResult, ...]:
    installed(home)
    monkeypatch.syspath_prepend(str(home / "src"))
    return run_checks(name.replace("-", "_"))


@pytest.mark.usefixtures("loaded_by_name")
@pytest.mark.parametrize(("engine", "partitions"), TOYS, ids=[f"{engine}-{count}" for engine, count in TOYS])
def test_a_toy_passes_every_check_that_needs_no_reference(
    engine: str, partitions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"new-{engine}-{partitions}"
    write_plugin(f"mstar-{name}", tmp_path / "home", engine=engine, partitions=partitions)
    results = results_of(tmp_path / "home", name, monkeypatch)
    assert {result.name: result.detail for result in results if result.outcome == "failed"} == {}
    assert {result.check.grade for result in results if result.outcome == "skipped"} == {"gold"}
    assert grade_of(results) == "silver"


@pytest.mark.usefixtures("loaded_by_name")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_is_gold_from_the_start(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"new-{kind}"
    write_plugin(f"mstar-{name}", tmp_path / "home", kind=kind)
    results = results_of(tmp_path / "home", name, monkeypatch)
    assert {result.name: result.detail for result in results if result.outcome != "passed"} == {}
    assert grade_of(results) == "gold"


@pytest.mark.usefixtures("loaded_by_name")
def test_a_model_without_its_causal_mask_agrees_with_itself_and_not_with_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    write_plugin("mstar-new-unmasked", home, kind="llm")
    plugin = home / "src" / "mstar_new_unmasked" / "plugin.py"
    text = plugin.read_text(encoding="utf-8")
    assert text.count(MASKED) == 1
    plugin.write_text(text.replace(MASKED, UNMASKED).replace("import CLIENT,", "import CLIENT, Attend,"))
    installed(home)
    monkeypatch.syspath_prepend(str(home / "src"))
    entry, models = find_entry("new_unmasked"), load_plugin("new_unmasked")
    subject = Subject(entry=entry, models=models, spec=models[0])
    chosen = [check for check in CHECKS if check.name in ("same-seed", "batch-equal", "reference")]
    results = {check.name: run_check(check, subject) for check in chosen}
    assert results["same-seed"].outcome == results["batch-equal"].outcome == "passed"
    assert results["reference"].outcome == "failed" and "differs" in results["reference"].detail


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_is_formatted_and_clean_by_the_rules_of_this_repository(kind: str, tmp_path: Path) -> None:
    """In its place under plugins, with a name that sorts before the core's and with one that sorts behind it."""
    for name in ("acme-speech", "mstar-speech"):
        write_plugin(name, tmp_path / "plugins" / name, kind=kind)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for command in (("format", "--check"), ("check",)):
        words = [str(Path(sys.executable).parent / "ruff"), *command, "--no-cache", "plugins"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_a_new_plugin_has_what_the_packaging_tests_ask_of_every_plugin(kind: str, tmp_path: Path) -> None:
    home = tmp_path / "mstar-speech"
    write_plugin(home.name, home, kind=kind)
    for check in (
        packaging.test_a_plugins_pin_admits_the_root_and_ends_before_the_next_minor,
        packaging.test_nothing_depends_on_the_distribution_of_a_stranger,
        packaging.test_every_dependency_says_why_it_is_there,
        packaging.test_a_licence_goes_with_every_distribution,
        packaging.test_every_distribution_has_a_readme_and_a_changelog,
        packaging.test_constraints_lie_inside_the_bounds,
    ):
        check(home)


@pytest.mark.slow
def test_new_plugins_pass_the_type_checker_of_this_repository(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace("$MYPY_CONFIG_FILE_DIR", str(ROOT))
    homes = [tmp_path / kind / "src" for kind in KINDS]
    for kind, home in zip(KINDS, homes, strict=True):
        write_plugin(f"mstar-typed-{kind}", home.parent, kind=kind)
    (path,) = re.findall(r'^mypy_path = "(.*)"$', text, re.MULTILINE)
    config = tmp_path / "pyproject.toml"
    config.write_text(text.replace(path, ":".join([path, *map(str, homes)])))
    words = [sys.executable, "-m", "mypy", "--config-file", str(config), *map(str, homes)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(300)
def test_a_new_plugin_is_served_before_anything_is_changed(tmp_path: Path) -> None:
    """The first minute of an author: `up NAME:tiny` of a plugin of which nothing is installed but its metadata."""
    home, folder = tmp_path / "home", Path(tempfile.mkdtemp(prefix="mst-"))
    write_plugin("mstar-new-served", home, kind="encdec")
    installed(home)
    paths = [str(home / "src"), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "MSTAR_RUNTIME_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
    }

    def mstarctl(*words: str) -> str:
        command = [sys.executable, "-m", "mstarctl", *words]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        port = str(free_port())
        mstarctl("up", "new_served:tiny", "-d", "--port", port, "--cache-dir", str(tmp_path / "cache"))
        assert mstarctl("call", "new_served", "--sample", "--param", "max_output_tokens=8")
    finally:
        mstarctl("down", "--all", "--now")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"engine": "kw"}, "kv, stateless"),
        ({"engine": "kv", "partitions": 0}, "1 to"),
        ({"engine": "kv", "partitions": 9}, "1 to"),
        ({"kind": "encdeck"}, "encdec"),
        ({"kind": "llm", "engine": "kv"}, "leave out --engine"),
    ],
)
def test_a_shape_that_cannot_be_made_is_refused(shape: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_plugin("mstar-new", tmp_path / "home", **shape)
    assert told in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "home").exists()


def test_the_command_writes_the_shape_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    assert run(["plugins", "new", "mstar-new", str(home), "--engine", "kv", "--partitions", "2"]) == 0
    text = (home / "src" / "mstar_new" / "plugin.py").read_text(encoding="utf-8")
    assert "engine=KV_CACHE" in text and "turner_2" in text and "turner_3" not in text
    assert run(["plugins", "new", "mstar-other", str(tmp_path / "other"), "--engine", "paged"]) == 2
    assert run(["plugins", "new", "mstar-other", str(tmp_path / "other"), "--shape", "diffusion"]) == 0
    assert (tmp_path / "other" / "src" / "mstar_other" / "reference.py").is_file()
    assert "mstarctl up other:tiny" in capsys.readouterr().err
