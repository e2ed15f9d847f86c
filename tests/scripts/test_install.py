"""`make install`: pip says nothing but errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fakes.script import script


def pip_install() -> list[str]:
    command: list[str] = script("install").pip_install()
    return command


def test_pip_prints_errors_and_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MSTAR_INSTALL_VERBOSE", raising=False)
    options = pip_install()[4:]
    words = ["--no-index", "--find-links", "/nonexistent", "a-package-that-is-nowhere"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *words], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "ERROR: No matching distribution found" in said
    assert "WARNING" not in said and "Looking in links" not in said


def test_everything_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_INSTALL_VERBOSE", "1")
    assert "--quiet" not in pip_install()
