"""Bytecode goes to the cache folder where Python would keep none, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mstar_core.host.cache_dir import BYTECODE, UNWRITTEN, bytecode_environment

PACKAGE = "imported_by_all"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without bytecode."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    source = tmp_path / "site" / PACKAGE / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("NUMBER = 7\n")
    return source


def imported(source: Path, environment: dict[str, str]) -> None:
    """Import the package in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in (BYTECODE, UNWRITTEN)}
    made = {**kept, "PYTHONPATH": str(source.parents[1]), **environment}
    subprocess.run([sys.executable, "-c", f"import {PACKAGE}"], env=made, check=True, timeout=120)


def test_a_process_keeps_bytecode_in_the_cache_folder_though_the_environment_forbids_it(
    package: Path, tmp_path: Path
) -> None:
    given = {UNWRITTEN: "1"}
    made = bytecode_environment(str(tmp_path / "cache"), given, PACKAGE)
    assert made[BYTECODE] == str(tmp_path / "cache" / "bytecode")
    imported(package, {**given, **made})
    (written,) = Path(made[BYTECODE]).rglob(f"{PACKAGE}/*.pyc")
    assert written.stat().st_size and not (package.parent / "__pycache__").exists()


def test_sources_that_cannot_be_written_beside_need_the_folder_too(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert set(bytecode_environment(str(tmp_path), {}, PACKAGE)) == {BYTECODE, UNWRITTEN}


def test_nothing_changes_where_python_keeps_bytecode(package: Path, tmp_path: Path) -> None:
    assert bytecode_environment(str(tmp_path), {}, PACKAGE) == {}, "it is written beside the sources"
    imported(package, {})
    assert bytecode_environment(str(tmp_path), {UNWRITTEN: "1"}, PACKAGE) == {}, "it is there already"
    assert bytecode_environment(str(tmp_path), {}, "no_such_package") == {}


def test_a_folder_that_the_user_names_is_kept(package: Path, tmp_path: Path) -> None:
    assert bytecode_environment(str(tmp_path), {BYTECODE: "/mine", UNWRITTEN: "1"}, PACKAGE) == {}
