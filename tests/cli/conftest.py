"""Run command lines in this process, with the toy plugin as the only one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mstarctl.main import run
from tests.plugin.toy import install


@dataclass(frozen=True, slots=True)
class Said:
    """Result of one command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Said]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run one command line and tell its exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MSTAR_PLUGINS", "toy")
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "site").mkdir()
    install(monkeypatch, tmp_path / "site")
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> Said:
        capsys.readouterr()
        code = run(argv)
        said = capsys.readouterr()
        return Said(int(code), said.out, said.err)

    return call
