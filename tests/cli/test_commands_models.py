"""Commands `models`, `config` and `plugins`, in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mstar_core.plugin.conformance import CHECKS, CheckResult
from mstarctl.authoring.checks import told_once
from tests.cli.conftest import Cli
from tests.plugin.toy import TOY, install


def test_models_are_listed_in_every_form(cli: Cli) -> None:
    (item,) = cli("models", "ls", "-o", "json").json["items"]
    assert (item["name"], item["inputs"], item["outputs"], item["walk_count"]) == ("toy", ["text"], ["audio"], 4)
    assert cli("models", "ls", "-o", "name").out == "model/toy\n"
    assert yaml.safe_load(cli("models", "ls", "-o", "yaml").out)["items"] == [item]
    assert "toy_one" in cli("models", "ls", "-o", "wide").out
    assert cli("models", "ls").out.splitlines()[1].split()[:3] == ["toy", "text", "audio"]


def test_a_model_is_shown_with_its_parameters_and_graph(cli: Cli) -> None:
    text = cli("models", "show", "toi").out
    assert "branch cfg of LLM" in text and "temperature" in text and "configurations: toy_one" in text
    (item,) = cli("models", "show", "toy", "-o", "json").json["items"]
    assert item["params_schema"]["properties"]["temperature"]["maximum"] == 2
    assert [node["name"] for node in item["nodes"]] == ["LLM", "LLM_cfg", "vocoder"]


def test_an_unknown_model_is_exit_4_with_the_nearest(cli: Cli) -> None:
    said = cli("models", "show", "toyy")
    assert said.code == 4 and "did you mean 'toy'?" in said.err


def test_a_graph_is_drawn_as_text_dot_and_json(cli: Cli) -> None:
    assert "LLM" in cli("models", "graph", "toy").out
    assert cli("models", "graph", "toy", "--format", "dot").out.lstrip().startswith("digraph")
    assert cli("models", "graph", "toy", "--format", "json").json


def test_a_model_without_code_or_plugin_is_told_from_a_broken_one(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "again", "import no_such_module")
    said = cli("models", "ls")
    assert said.code == 0 and "warning: plugin toy: broken: ModuleNotFoundError" in said.err
    shown = cli("models", "show", "toy")
    assert shown.code == 3 and "plugin 'toy' cannot be used" in shown.err


def test_files_are_validated_one_by_one(cli: Cli, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("model: toy\nnode_groups:\n  - {node_names: [LLM, vocoder], ranks: [0, 1]}\n")
    bad.write_text("model: toy\nnode_groups:\n  - {node_names: [LLM, vocodr], ranks: [0]}\n")
    said = cli("config", "validate", "good.yaml", "bad.yaml", "toy")
    assert said.code == 3
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["good.yaml", "ok"],
        ["bad.yaml", "toy"],
        ["toy", "ok"],
    ]
    assert "error: toy has no node 'vocodr'; did you mean 'vocoder'?" in said.err and "bad.yaml:3" in said.err
    (item,) = cli("config", "validate", "bad.yaml", "-o", "json").json["items"]
    assert (item["error"]["line"], item["error"]["nearest"]) == (3, "vocoder")
    assert cli("config", "validate", "good.yaml").code == 0
    short = cli("config", "validate", "good.yaml", "--devices", "1")
    assert short.code == 3 and "no device backs rank 1" in short.err


def test_a_resolved_configuration_names_its_sources(cli: Cli) -> None:
    said = cli("config", "show", "toy", "--resolved", "--set", "kv_cache.pages=9", "-o", "json")
    sources = {item["name"]: (item["value"], item["source"]) for item in said.json["items"]}
    assert sources["kv_cache.pages"] == (9, "--set kv_cache.pages=9")
    assert sources["max_queue"] == (128, "default")
    assert sources["max_seq_len"][1].endswith("toy_one.yaml:3")
    assert cli("config", "show", "toy").out.startswith("# one rank\nmodel: toy")
    assert cli("config", "show", "toy", "--set", "max_queue=1").code == 2
    assert cli("config", "show", "toy", "--resolved", "--set", "max_queu=1").code == 3


def test_keys_are_explained(cli: Cli) -> None:
    assert "kv_cache.pages  (integer >= 1" in cli("config", "explain", "kv_cache.pages").out
    assert "page_size" in cli("config", "explain", "kv_cache").out
    assert len(cli("config", "explain", "-o", "json").json["items"]) > 20
    said = cli("config", "explain", "kv_cache.pagse")
    assert said.code == 4 and "did you mean" in said.err


def test_a_written_file_validates_and_is_not_overwritten_unasked(cli: Cli, tmp_path: Path) -> None:
    assert cli("config", "init", "toy", "new.yaml").code == 0
    assert cli("config", "validate", "new.yaml").code == 0
    again = cli("config", "init", "toy", "new.yaml")
    assert again.code == 2 and "pass --yes" in again.err
    assert cli("config", "init", "toy", "new.yaml", "--yes").code == 0
    assert cli("config", "init", "toy").out == (tmp_path / "new.yaml").read_text()


def test_two_configurations_are_compared(cli: Cli, tmp_path: Path) -> None:
    cli("config", "init", "toy", "new.yaml")
    (item,) = cli("config", "diff", "toy", "new.yaml", "-o", "json").json["items"]
    assert (item["name"], item["left"], item["right"]) == ("max_seq_len", 512, 8192)
    assert cli("config", "diff", "toy", "toy").out == ""
    assert cli("config", "schema").json["required"] == ["model", "node_groups"]


def test_plugins_are_listed_with_what_is_wrong(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    items = {item["name"]: item for item in cli("plugins", "ls", "-o", "json").json["items"]}
    assert (items["toy"]["state"], items["toy"]["models"]) == ("ok", ["toy"])
    install(monkeypatch, tmp_path / "again", "import no_such_module")
    items = {item["name"]: item for item in cli("plugins", "ls", "-o", "json").json["items"]}
    assert items["toy"]["problem"]["phase"] == "import"
    told = cli("plugins", "info", "toy", "--debug").out
    assert "ModuleNotFoundError" in told and "Traceback" in told and "plugin.py:1" in told
    assert cli("plugins", "info", "toyy").code == 4


def test_names_are_listed_without_an_import(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = install(
        monkeypatch, tmp_path / "again", "import pathlib\npathlib.Path(__file__).with_name('seen').touch()\n"
    )
    assert "toy" in cli("plugins", "ls", "--names").out
    assert not (home / "seen").exists()


def test_a_sound_plugin_passes_every_check_that_can_be_made_here(cli: Cli) -> None:
    said = cli("plugins", "check", "toy", "-o", "json")
    outcomes = {item["name"]: (item["outcome"], item["detail"]) for item in said.json["items"]}
    light = {"light-import", "pins", "spec", "json-form", "programs", "params", "configs", "targets"}
    assert {name: outcomes[name] for name in light} == {name: ("passed", "") for name in light}
    assert outcomes["same-seed"] == ("skipped", "the model has no tiny checkpoint")
    assert "failed" not in {outcome for outcome, _ in outcomes.values()}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (("from dataclasses import", "import numpy\nfrom dataclasses import"), "light-import"),
        (("samples=(Sample", "samples=() and (Sample"), "programs"),
        (('default_config="toy_one"', 'default_config="toy_two"'), "configs"),
        (('"toy_plugin.model:Toy"', '"toy_plugin.modle:Toy"'), "targets"),
    ],
)
def test_a_fault_fails_its_check_and_exits_3(
    change: tuple[str, str], check: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "again", TOY.replace(*change))
    said = cli("plugins", "check", "toy", "-o", "json", "--debug")
    assert f"{check}: Traceback" in said.err
    failed = [item["name"] for item in said.json["items"] if item["outcome"] == "failed"]
    assert (said.code, failed, said.json["grade"]) == (3, [check], None)


def test_a_cause_that_several_checks_meet_is_told_once() -> None:
    check = CHECKS[0]
    results = [
        CheckResult(check=replace(check, name=name), outcome="failed", model="foo", detail=detail)
        for name, detail in (("serves", "no 'hidden'"), ("equal", "no 'hidden'"), ("ends", "another"))
    ]
    told = [result.detail for result in told_once(results)]
    assert told == ["no 'hidden'", "the same cause as serves", "another"]


def test_an_open_pin_fails_its_check(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "again", requires="mstarctl>=0.1")
    failed = [
        item for item in cli("plugins", "check", "toy", "-o", "json").json["items"] if item["outcome"] == "failed"
    ]
    assert [item["name"] for item in failed] == ["pins"]


def test_a_new_plugin_works_and_its_own_tests_pass(cli: Cli, tmp_path: Path) -> None:
    said = cli("plugins", "new", "mstar-foo", "foo", "-o", "json")
    assert said.code == 0 and len(said.json["items"]) >= 10
    home = tmp_path / "foo"
    info = home / "src" / "mstar_foo-0.1.0.dist-info"
    info.mkdir()
    project = (home / "pyproject.toml").read_text()
    requirement = next(line.split('"')[1] for line in project.splitlines() if '"mstarctl[' in line)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: mstar-foo\nVersion: 0.1.0\nRequires-Dist: {requirement}\n"
    )
    (info / "entry_points.txt").write_text("[mstar.plugins]\nfoo = mstar_foo.plugin\n")
    path = os.pathsep.join([str(home / "src"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "MSTAR_PLUGINS": "foo"}
    some = "not TestConformance or light or spec"  # tests/conformance holds new plugins to all of them
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, str(home)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout and "failed" not in done.stdout


@pytest.mark.parametrize("name", ["mstar", "mstarctl", "Mstar-Foo", "foo", "mstar_foo", "mstar-"])
def test_a_name_that_no_plugin_should_have_is_refused(name: str, cli: Cli, tmp_path: Path) -> None:
    said = cli("plugins", "new", name, "foo")
    assert said.code == 2 and not (tmp_path / "foo").exists()


def test_a_folder_that_is_not_empty_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "foo").mkdir()
    (tmp_path / "foo" / "mine").write_text("mine")
    said = cli("plugins", "new", "mstar-foo", "foo")
    assert said.code == 2 and [path.name for path in (tmp_path / "foo").iterdir()] == ["mine"]
