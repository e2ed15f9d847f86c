"""Loading in two stages: working plugins, broken plugins, and isolation of their failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.files.load import default_config
from mstar_core.config.files.resolution import resolve
from mstar_core.errors import NotFound, PluginError
from mstar_core.plugin import load_plugin, plugin_entries
from mstarctl.plugins import Plugins
from tests.plugin.toy import TOY, entries, install

OTHER = TOY.replace('name="toy"', 'name="other"').replace('plugin="toy"', 'plugin="other"').replace("toi", "oth")


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MSTAR_PLUGINS", "MSTAR_PLUGINS_STRICT", "MSTAR_TRACE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_metadata_is_read_without_an_import(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path, "raise RuntimeError('imported')")
    entry = next(entry for entry in plugin_entries() if entry.name == "toy")
    assert (entry.distribution, entry.version) == ("mstar-toy", "0.1.0")
    assert entry.requires == ("mstarctl<1,>=0.1",)


def test_a_model_is_found_by_name_alias_and_distribution(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path)
    plugins = Plugins.discover(entries("toy"))
    assert plugins.problems() == ()
    assert [plugins.model(name).name for name in ("toy", "toi", "mstar-toy/toy")] == ["toy"] * 3


def test_an_unknown_model_names_the_nearest(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path)
    with pytest.raises(NotFound, match="did you mean 'toy'"):
        Plugins.discover(entries("toy")).model("toyy")


BROKEN = {
    "import": (
        "import no_such_module\n",
        "broken",
        "ModuleNotFoundError: No module named 'no_such_module'",
        "plugin.py:1",
    ),
    "syntax": ("x = 1\ndef f(:\n", "broken", "SyntaxError", "plugin.py:2"),
    "exit": ("\n\nraise SystemExit(3)\n", "broken", "SystemExit: 3", "plugin.py:3"),
    "api": (TOY.replace("PLUGIN_API = 1", "PLUGIN_API = 2"), "incompatible", "needs plugin API 2, this is 1", ""),
    "no api": (TOY.replace("PLUGIN_API = 1", ""), "incompatible", "PLUGIN_API is missing", ""),
    "hook": (TOY + "\n@hookimpl\ndef mstar_modles():\n    return []\n", "invalid", "did you mean 'mstar_models'", ""),
    "argument": (TOY + "\n@hookimpl\ndef mstar_workloads(modl):\n    pass\n", "invalid", "modl", ""),
    "unmarked": (TOY + "\ndef mstar_doctor():\n    return []\n", "invalid", "mstar_doctor lacks the hook marker", ""),
    "plugin name": (TOY.replace('plugin="toy"', 'plugin="tyo"'), "invalid", "names plugin 'tyo'", ""),
    "models raise": (TOY.replace("return [TOY]", "return [1 // 0]"), "broken", "ZeroDivisionError", "plugin.py:"),
    "no spec": (TOY.replace("return [TOY]", "return ['toy']"), "invalid", "mstar_models returns a str", ""),
    "edge": (TOY.replace('GraphEdge("pcm", CLIENT', 'GraphEdge("pmc", CLIENT'), "invalid", "pmc", ""),
    "walk": (TOY.replace('Run("chunk")', 'Run("chnk")'), "invalid", "did you mean 'chunk'", ""),
    "input": (TOY.replace('Run("prefill", tokens=', 'Run("prefill", tokns='), "invalid", "did you mean 'tokens'", ""),
    "default": (
        TOY.replace("param(0.6,", "param(6.0,"),
        "invalid",
        "default of parameter 'temperature' is refused",
        "",
    ),
    "flag": (TOY.replace('unless="ignore_eos"', 'unless="ignore_eso"'), "invalid", "ignore_eso", ""),
}


@pytest.mark.parametrize(("code", "state", "cause", "place"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_named_and_the_others_go_on(
    code: str, state: str, cause: str, place: str, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(patch, tmp_path / "a", code)
    install(patch, tmp_path / "b", OTHER, package="other_plugin", name="other", distribution="mstar-other")
    plugins = Plugins.discover(entries("toy", "other"))
    (problem,) = plugins.problems()
    assert (problem.plugin, problem.state) == ("toy", state)
    assert cause in problem.text and place in problem.place
    assert plugins.model("other").name == "other"
    with pytest.raises(PluginError, match="plugin 'toy' cannot be used"):
        plugins.model("toy")


def test_an_unmet_pin_is_not_imported_and_says_how_to_mend_it(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path, "raise RuntimeError('imported')", requires="mstarctl<9.2,>=9.1")
    patch.setattr("mstar_core.plugin.loader.own_version", lambda: "0.1.0")
    (problem,) = Plugins.discover(entries("toy")).problems()
    assert problem.state == "incompatible"
    assert problem.cause == "needs mstarctl<9.2,>=9.1, installed is 0.1.0"
    assert "pip install" in problem.hint


def test_ctrl_c_during_an_import_is_never_caught(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Plugins.discover(entries("toy"))


def test_two_plugins_with_one_model_name_are_both_named_and_neither_wins(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(patch, tmp_path / "a")
    twin = TOY.replace('plugin="toy"', 'plugin="twin"')
    install(patch, tmp_path / "b", twin, package="twin_plugin", name="twin", distribution="mstar-twin")
    plugins = Plugins.discover(entries("toy", "twin"))
    with pytest.raises(PluginError, match=r"mstar-toy/toy, mstar-twin/toy"):
        plugins.model("toy")
    assert plugins.model("mstar-twin/toy").plugin == "twin"
    assert plugins.models() == ()


def test_the_allow_list_leaves_the_others_unimported(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path / "a", "raise RuntimeError('imported')")
    install(patch, tmp_path / "b", OTHER, package="other_plugin", name="other", distribution="mstar-other")
    plugins = Plugins.discover(entries("toy", "other"), {"MSTAR_PLUGINS": "other"})
    assert {item.entry.name: item.state for item in plugins.loaded} == {"toy": "disabled", "other": "ok"}
    with pytest.raises(PluginError, match="disabled"):
        plugins.model("toy")
    with pytest.raises(PluginError, match="did you mean 'other'"):
        Plugins.discover(entries("toy", "other"), {"MSTAR_PLUGINS": "othr"})


def test_strict_ends_with_the_first_problem(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path, "import no_such_module")
    with pytest.raises(PluginError, match="no_such_module"):
        Plugins.discover(entries("toy"), {"MSTAR_PLUGINS_STRICT": "1"})


def test_tracing_tells_imports_and_hook_calls(
    patch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(patch, tmp_path)
    Plugins.discover(entries("toy"), {"MSTAR_TRACE_PLUGINS": "1"}).doctor()
    told = capsys.readouterr().err
    assert "import toy_plugin.plugin (mstar-toy 0.1.0)" in told
    assert "call mstar_doctor()" in told


def test_a_hook_that_raises_gives_the_default_and_is_counted(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        patch,
        tmp_path,
        TOY
        + "\n@hookimpl\ndef mstar_plan(model):\n    raise OSError('full')\n"
        + "\n@hookimpl\ndef mstar_doctor():\n    raise OSError('full')\n",
    )
    plugins = Plugins.discover(entries("toy"))
    spec = plugins.model("toy")
    assert plugins.plan(spec, resolve(spec, default_config(spec)), ("cpu",)).ranks
    (finding,) = plugins.doctor()
    assert finding.state == "failed" and "toy" in finding.name
    assert plugins.failures == {"toy.mstar_plan": 1, "toy.mstar_doctor": 1}


def test_a_child_loads_one_plugin_alone(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(patch, tmp_path / "a", "raise RuntimeError('imported')")
    install(patch, tmp_path / "b", OTHER, package="other_plugin", name="other", distribution="mstar-other")
    assert [spec.name for spec in load_plugin("other")] == ["other"]
    with pytest.raises(PluginError, match="cannot be used"):
        load_plugin("toy")
