"""What compute-sanitizer prints is read as what it means."""

from __future__ import annotations

import pytest

from scripts.sanitize import FOUND, read

PASSED = "......   [100%]\n6 passed, 2 deselected in 9.1s\n"


@pytest.mark.parametrize(
    ("output", "code", "errors", "is_clean"),
    [
        (PASSED + "========= ERROR SUMMARY: 0 errors\n", 0, 0, True),
        (PASSED + "========= ERROR SUMMARY: 3 errors\n", FOUND, 3, False),
        (PASSED + "========= ERROR SUMMARY: 1 error\n", FOUND, 1, False),
        (PASSED + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0, True),
        (PASSED + "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", FOUND, 2, False),
        ("1 failed, 5 passed in 3s\n========= ERROR SUMMARY: 0 errors\n", 1, 0, False),
        ("no tests ran in 0.1s\n========= ERROR SUMMARY: 0 errors\n", 5, 0, False),
        (PASSED, 0, None, False),
        (PASSED + "something else\n", FOUND, 1, False),
        ("========= Error: Target application terminated before first instrumented API call\n", 255, None, False),
    ],
)
def test_only_a_run_without_findings_and_with_passing_tests_is_clean(
    output: str, code: int, errors: int | None, is_clean: bool
) -> None:
    finding = read("memcheck", output, code, 1.0)
    assert (finding.errors, finding.is_clean) == (errors, is_clean)
