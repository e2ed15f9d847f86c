"""Pages on plugins and deployment files agree with the code."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.config.files.load import read_text
from mstar_core.config.files.resolution import resolve
from mstar_core.config.key import Setting
from mstar_core.config.schema import SETTINGS
from mstar_core.plugin.hookspecs import HOOKS
from mstarctl.authoring.config_schema import default_shown
from mstarctl.authoring.scaffold import write_plugin
from mstarctl.main import run
from mstarctl.plugins import Plugins

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLUGINS = (DOCS / "plugins.md").read_text(encoding="utf-8")
CONFIG = (DOCS / "config.md").read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_typed_and_documented_with_an_example(hook: Callable[..., Any]) -> None:
    signature = inspect.signature(hook)
    assert f"{hook.__name__}{signature}".replace("'", "") in PLUGINS
    assert f"### {hook.__name__}\n" in PLUGINS
    assert hook.__doc__ and "Since plugin API" in hook.__doc__
    assert signature.return_annotation is not signature.empty
    assert all(item.annotation is not item.empty for item in signature.parameters.values())
    assert any(f"@hookimpl\ndef {hook.__name__}(" in block for block in blocks(PLUGINS, "python"))


@pytest.mark.parametrize("item", SETTINGS, ids=lambda item: item.key)
def test_every_key_is_in_the_table(item: Setting) -> None:
    assert f"| `{item.key}` | {item.allowed} | {default_shown(item)} | {item.doc} |" in CONFIG


def test_the_tutorial_is_the_template(tmp_path: Path) -> None:
    written = "\n".join(path.read_text(encoding="utf-8") for path in write_plugin("mstar-foo", tmp_path / "foo"))
    tutorial, _, rest = PLUGINS.partition("## How plugins are found")
    conformance = rest.partition("## Conformance")[2].partition("\n## ")[0]
    shown = [*blocks(tutorial, "python"), *blocks(conformance, "python")]
    assert len(shown) == 7
    for block in shown:
        assert block.strip() in written


def test_the_example_file_is_valid() -> None:
    (text,) = blocks(CONFIG, "yaml")
    spec = Plugins.discover(environment={}).model("qwen3_omni")
    assert resolve(spec, read_text(text, "docs/config.md")).rank_count == 2


def test_the_commands_on_deployment_files_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSTAR_PLUGINS", "orpheus")
    lines = [line.removeprefix("$ ") for block in blocks(CONFIG, "console") for line in block.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        assert run(shlex.split(line)[1:]) == 0, line
