"""Examples that hypothesis draws: the same in every process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[tuple[int, str]]:
    examples = []

    @given(st.integers(), st.text())
    def look(number: int, text: str) -> None:
        examples.append((number, text))

    look()
    return examples


def test_examples_do_not_depend_on_the_modules_that_a_process_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    path = tmp_path / "numbers_alone.py"
    path.write_text(f"NUMBERS = {list(range(10_000_000, 10_001_000))}\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, path.stem, importlib.util.module_from_spec(spec))
    assert drawn() == before
