"""Parallel GPU tests: every file is found, failures are reported, and a hanging file prints its traceback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scripts.gpu_tests import ALONE, ROOT, gpu_files, main, run


def write(folder: Path, body: str) -> str:
    file = folder / "test_gpu_it.py"
    file.write_text(f"import time\nimport pytest\n\n\n@pytest.mark.gpu\ndef test_it():\n    {body}\n")
    return str(file)


def test_every_file_with_the_mark_is_found_and_those_that_run_alone_come_last() -> None:
    actual = gpu_files()
    assert tuple(actual[-len(ALONE) :]) == ALONE
    marked = {
        str(path.relative_to(ROOT))
        for folder in (ROOT / "tests", ROOT / "plugins")
        for path in folder.rglob("test_*.py")
        if "\npytestmark = pytest.mark.gpu" in path.read_text()
    }
    assert marked and marked <= set(actual)


def test_a_failure_is_told_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "assert 1 == 2")
    assert main(["--file", file, "-p", "no:randomly"]) == 1
    said = capsys.readouterr().out
    assert "assert 1 == 2" in said and f"FAILED {file}" in said


def test_a_file_that_does_not_end_is_interrupted_and_says_where(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    file = write(tmp_path, f"open({str(begun)!r}, 'w').close(); time.sleep(600)")
    for limit_s in (12, 40, 120):  # a busy machine imports for long
        ran = run(file, (), time.monotonic() + limit_s)
        if begun.exists():
            break
    assert not ran.is_good and ran.seconds < 600
    assert "test_gpu_it.py:7: KeyboardInterrupt" in ran.text and ran.last == "not done in time"
