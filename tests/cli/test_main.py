"""Command line: table of commands, global flags, errors, exit codes."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mstar_core.errors import ExitCode, MstarError, NotFound, StartError
from mstarctl import main
from mstarctl.commands.help import MEANINGS
from mstarctl.complete import voice_names, workload_names
from mstarctl.main import VERBS, Verb
from mstarctl.output.errors import render_error
from tests.cli.conftest import Cli
from tests.fakes.commands import output_of

HEAVY = ("torch", "textual", "sanic", "httpx", "aiohttp", "yaml", "pluggy", "rich", "msgspec")


def target_of(verb: Verb) -> Any:
    module, _, attribute = verb.target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_table_says_what_the_command_says_of_itself(verb: Verb) -> None:
    target = target_of(verb)
    sentence = target.info.help if isinstance(target, typer.Typer) else inspect.getdoc(target)
    assert sentence is not None and sentence.splitlines()[0] == verb.help


def test_help_imports_no_verb_and_nothing_heavy(fresh_mstarctl: Callable[..., Any]) -> None:
    fresh = fresh_mstarctl("--help")
    assert fresh.code == 0
    assert fresh.loaded(HEAVY) == set()
    assert {name for name in fresh.modules if name.startswith("mstarctl.commands")} == set()
    for verb in VERBS:
        assert verb.name in fresh.stdout and verb.help.split(".")[0][:20] in fresh.stdout


def user_s(body: str) -> float:
    """User time of a new interpreter that runs this: the best of five is steady on a loaded host."""
    command = [sys.executable, "-c", f"import os\n{body}\nprint(os.times().user)"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return min(float(output_of(command, env=environment).splitlines()[-1]) for _ in range(5))


def test_help_costs_little_processor_time() -> None:
    """The budget is 200 ms. A slower machine is known by what the standard library's own `asyncio` costs there."""
    spent = user_s("from mstarctl.main import run\nrun(['--help'])")
    assert spent < 0.2 or spent < 3 * user_s("import asyncio"), spent


def test_no_words_at_all_show_the_help(cli: Cli) -> None:
    said = cli()
    assert said.code == 0 and "Usage: mstarctl" in said.out


def test_an_unknown_command_names_the_nearest(cli: Cli) -> None:
    said = cli("plugin")
    assert said.code == 2
    assert said.err == "error: unknown command 'plugin'; did you mean 'plugins'?  [usage, exit 2]\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("models", "lss"),
        ("models", "ls", "--jsno"),
        ("models", "show"),
        ("version", "-o", "jsn"),
        ("completion", "tcsh"),
    ],
)
def test_wrong_usage_is_exit_2_on_stderr(argv: tuple[str, ...], cli: Cli) -> None:
    said = cli(*argv)
    assert said.code == ExitCode.USAGE
    assert said.out == "" and said.err.startswith("error: ") and "[usage, exit 2]" in said.err


def test_global_flags_stand_before_and_after_the_verb(cli: Cli) -> None:
    first, second, third = (
        cli("-o", "json", "version"),
        cli("version", "-o", "json"),
        cli("plugins", "-o", "name", "ls", "-o", "json"),
    )
    assert first.json == second.json
    assert third.json["kind"] == "plugin"


def test_quiet_leaves_the_data_alone(cli: Cli) -> None:
    assert cli("plugins", "ls", "--names", "-q").out == cli("plugins", "ls", "--names").out


def test_exit_codes_are_listed_one_by_one(cli: Cli) -> None:
    assert set(MEANINGS) == set(ExitCode)
    items = cli("help", "exit-codes", "-o", "json").json["items"]
    assert [item["exit"] for item in items] == [int(code) for code in ExitCode]


@pytest.mark.parametrize("code", list(ExitCode)[1:10], ids=lambda code: code.name)
def test_an_error_ends_with_its_own_code(code: ExitCode, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(MstarError):
        exit_code = code

    def fail() -> None:
        raise Wrong("it is wrong")

    monkeypatch.setattr(main, "VERBS", (Verb("fail", f"{__name__}:fail", "", ""),))
    monkeypatch.setattr(main, "resolve", lambda verb: _command(fail))
    assert cli("fail").code == code


def _command(function: Callable[[], None]) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    return typer.main.get_command(app)


def test_a_bug_saves_its_traceback_and_shows_the_path(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(main, "resolve", lambda verb: _command(fail))
    said = cli("version")
    (saved,) = (tmp_path / "state" / "mstar" / "crashes").iterdir()
    assert said.code == ExitCode.INTERNAL
    assert "ZeroDivisionError: a bug" in said.err and f"log: {saved}" in said.err
    assert "Traceback" not in said.err and "Traceback" in saved.read_text()
    assert saved.stat().st_mode & 0o077 == 0
    assert "Traceback" in cli("--debug", "version").err


@pytest.mark.parametrize(("word", "meant"), [("statu", "ps"), ("status", "ps"), ("stop", "down"), ("start", "up")])
def test_words_of_other_tools_lead_to_a_command(word: str, meant: str, cli: Cli) -> None:
    assert f"did you mean {meant!r}?" in cli(word).err


def test_ctrl_c_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(main, "resolve", lambda verb: _command(interrupt))
    assert cli("version").code == 130


def test_an_error_is_written_what_why_try_log() -> None:
    error = StartError("x does not fit", "needs 2\nfree 1", "mstarctl up x --gpus 0,1", log="w.log:3", phase="kv")
    assert render_error(error).splitlines() == [
        "error: x does not fit  [start-failed, exit 6]",
        "  needs 2",
        "  free 1",
        "  try: mstarctl up x --gpus 0,1",
        "  log: w.log:3",
    ]


def test_the_class_and_code_end_at_the_given_column() -> None:
    line = render_error(NotFound("no node 'a'", hint="did you mean 'b'?"), width=80)
    assert len(line) == 80 and line.endswith("[not-found, exit 4]")


def test_completion_knows_the_verbs_and_never_prints_an_error(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "_MSTARCTL_COMPLETE=complete_bash" in cli("completion", "bash").out
    monkeypatch.setenv("_MSTARCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "mstarctl pl")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as ended:
        main.run([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == ["plan", "plugins"]


@pytest.mark.parametrize(
    ("words", "count", "found"),
    [
        ("mstarctl models show to", 3, ["toy"]),
        ("mstarctl up to", 2, ["toy", "toy_one"]),
        ("mstarctl up toy --config to", 4, ["toy_one"]),
        ("mstarctl config show to", 3, ["toy", "toy_one"]),
        ("mstarctl top --view re", 3, ["requests"]),
        ("mstarctl config explain kv_cache.pa", 3, ["kv_cache.page_size", "kv_cache.pages"]),
    ],
)
def test_names_are_completed_without_importing_a_plugin(
    words: str,
    count: int,
    found: list[str],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_MSTARCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(count))
    with pytest.raises(SystemExit):
        main.run([])
    said = capsys.readouterr()
    assert (said.out.split(), said.err) == (found, "")
    assert "toy_plugin.plugin" not in sys.modules


def test_version_names_client_api_and_plugins(cli: Cli) -> None:
    (facts,) = cli("version", "-o", "json").json["items"]
    assert {"client", "python", "plugin_api", "plugins"} <= set(facts)
    assert "toy" in [plugin["name"] for plugin in facts["plugins"]]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    code = "from mstarctl.__main__ import main; main()"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code, "config", "explain"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("models", "ls"),
        ("models", "show", "toy"),
        ("models", "graph", "toy"),
        ("config", "show", "toy"),
        ("config", "show", "toy", "--resolved"),
        ("config", "validate", "toy"),
        ("config", "explain", "max_seq_len"),
        ("config", "schema"),
        ("plugins", "ls"),
        ("plugins", "info", "toy"),
        ("context", "ls"),
        ("context", "show"),
        ("describe", "model/toy"),
        ("describe", "plugin/toy"),
        ("version",),
        ("help", "exit-codes"),
    ],
    ids=" ".join,
)
def test_a_read_can_be_had_by_name_as_yaml_and_as_json(words: tuple[str, ...], cli: Cli) -> None:
    """`-o name` is one kind/name a line whatever is read; the deployments' reads are held in tests/cli/life."""
    lines = cli(*words, "-o", "name").out.splitlines()
    assert lines and all(re.fullmatch(r"[a-z-]+/\S+", line) for line in lines), lines
    as_yaml, as_json = yaml.safe_load(cli(*words, "-o", "yaml").out), cli(*words, "-o", "json").json
    for item in (*as_yaml.get("items", ()), *as_json.get("items", ())):
        item.pop("import_ms", None)  # measured anew each time
    assert as_yaml == as_json


def test_voices_are_completed_from_the_installed_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path))
    assert {"tara", "leah"} <= set(voice_names("")) and voice_names("ta") == ["tara"]


def test_workloads_are_completed_from_the_installed_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path))
    assert {"robot", "chat", "mixed"} <= set(workload_names("")) and workload_names("rob") == ["robot"]
