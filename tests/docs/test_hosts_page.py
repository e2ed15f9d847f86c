"""Commands and the program on the page of several hosts, other than those of mstarctl itself."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from mstar_core.cluster.owner import Owner, Reservation

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
LINES = [line.strip() for line in PAGE.replace("\\\n", " ").splitlines()]


def typed(program: str) -> list[list[str]]:
    """Return the words of each command line of the page that begins with a program."""
    return [shlex.split(line) for line in LINES if line.startswith(f"{program} ")]


def test_options_of_ray_start_exist() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs Ray")
    known = {word for option in scripts.start.params for word in option.opts}
    starts = typed("ray start")
    assert len(starts) == 4
    for words in starts:
        assert {word.partition("=")[0] for word in words[2:]} <= known


def test_the_program_that_removes_room_removes_that_of_one_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = [
        str(Reservation(deployment, Owner(host="h", pid=7, begun=1), "gpu2"))
        for deployment in ("orpheus", "orpheus2", "bagel")
    ]
    table = {number: {"name": name, "state": "CREATED"} for number, name in enumerate([*names, "another"])}
    table[9] = {"name": names[0], "state": "REMOVED"}
    removed: list[str] = []
    calls: list[Any] = []
    ray, util = ModuleType("ray"), ModuleType("ray.util")
    ray.init = lambda *words, **options: calls.append((words, options))  # type: ignore[attr-defined]
    util.placement_group_table = lambda: table  # type: ignore[attr-defined]
    util.get_placement_group = lambda name: SimpleNamespace(name=name)  # type: ignore[attr-defined]
    util.remove_placement_group = lambda group: removed.append(group.name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    exec(compile(program, "docs/hosts.md", "exec"), {})  # noqa: S102 a program of this repository
    assert calls == [(("auto",), {"namespace": "mstar"})]
    assert removed == names[:1]


def test_commands_of_kubernetes_name_objects_of_the_manifest() -> None:
    manifest = (ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")
    objects = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(manifest)}
    words = [word for line in typed("kubectl") for word in line]
    named = {word for word in words if word.startswith(("deployment/", "deploy/mstar"))}
    assert {word.partition("/")[2] for word in named} == {name for kind, name in objects if kind == "Deployment"}
    assert "deploy/kuberay.yaml" in words
    secret = words[words.index("generic") + 1]
    assert f"secretName: {secret}" in manifest
