"""Command lines in this process, against deployments of fake children and with the installed plugins."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mstarctl.main import run
from tests.fakes.deployment import make_spec, play, runtime, start
from tests.fakes.ports import free_port

__all__ = ["make_spec", "play", "runtime", "start"]


@dataclass(frozen=True, slots=True)
class Said:
    """Result of one command line."""

    code: int
    out: str
    err: str

    @property
    def items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.out)["items"]
        return items


Cli = Callable[..., Said]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], runtime: Path) -> Cli:
    """Run one command line and return its exit code, stdout and stderr."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> Said:
        capsys.readouterr()
        code = run(argv)
        said = capsys.readouterr()
        return Said(int(code), said.out, said.err)

    return call


def own_port() -> tuple[str, str]:
    """Return options for a free api port, because the default may be taken on any machine."""
    return "--port", str(free_port())
