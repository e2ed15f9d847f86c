"""Parsing of compute-sanitizer's output."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from scripts.sanitize import FOUND, OWN, explained_kernels, failures_of, kernels_in, read, run

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
    finding = read("memcheck", "test_a.py", output, code, 1.0)
    assert (finding.errors, finding.is_clean) == (errors, is_clean)


MEMCHECK = """\
========= Invalid __global__ read of size 4 bytes
=========     at _scale_kernel+0x120 in nucleus.py:58
=========     by thread (3,0,0) in block (0,0,0)
=========     Access to 0x7f0000000200 is out of bounds
=========
========= Invalid __global__ write of size 2 bytes
=========     at 0x1b0 in decode_kernel
=========     by thread (0,0,0) in block (1,0,0)
"""
OTHERS = """\
========= Error: Race reported between Write access at finish_kernel+0xa90 in nucleus.py:190
=========     and Read access at finish_kernel+0xb10 in nucleus.py:191 [64 hazards]
=========
========= Warning: Race reported between Read access at gather_kernel+0x10 in nucleus.py:1
=========     and Write access at gather_kernel+0x20 in nucleus.py:2 [1 hazards]
========= Barrier error detected. Divergent thread(s) in block.
=========     at _rotate_kernel+0x90 in fused.py:100
"""


def test_reports_are_counted_kernel_by_kernel() -> None:
    assert kernels_in(MEMCHECK) == {"_scale_kernel": 1, "decode_kernel": 1}
    assert kernels_in(MEMCHECK + OTHERS + MEMCHECK) == {
        "_scale_kernel": 2,
        "decode_kernel": 2,
        "finish_kernel": 1,
        "gather_kernel": 1,
        "_rotate_kernel": 1,
    }
    finding = read(
        "memcheck", "test_a.py", "FAILED tests/gpu/test_kernels.py::test_kernels[a] - x\n" + MEMCHECK, 1, 1.0
    )
    assert finding.lines()[1:] == [
        "  memcheck    1 x _scale_kernel",
        "  memcheck    1 x decode_kernel",
        "  memcheck failed: tests/gpu/test_kernels.py::test_kernels[a]",
    ]


def test_reports_of_explained_kernels_do_not_fail_a_run_but_those_of_others_do() -> None:
    (name, *_) = sorted(explained_kernels())
    summary = "========= RACECHECK SUMMARY: {} hazards displayed (2 errors, 0 warnings)\n"
    report = OTHERS.partition("========= Warning")[0]
    known = report.replace("finish_kernel", name)
    finding = read("racecheck", "test_a.py", PASSED + known + known + summary.format(2), FOUND, 1.0)
    assert finding.is_clean
    assert finding.lines()[1:] == [f"  racecheck    2 x {name}, explained"]
    assert not read("racecheck", "test_a.py", PASSED + known + report + summary.format(2), FOUND, 1.0).is_clean
    assert not read("racecheck", "test_a.py", PASSED + known + summary.format(2), FOUND, 1.0).is_clean
    assert not read("memcheck", "test_a.py", PASSED + known + known + summary.format(2), FOUND, 1.0).is_clean


def test_the_first_reports_and_failures_are_shown() -> None:
    early = "=== FAILURES ===\nE   the cause\n"
    shown = failures_of(MEMCHECK * 9 + early + "x" * 9000)
    assert shown.count("_scale_kernel") < 9 and "the cause" in shown and len(shown) < 9000
    assert failures_of("no test was found") == "no test was found"


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("_scale_kernel", True),
        ("decode_kernel", True),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4E", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", False),
    ],
)
def test_only_own_kernels_are_watched(name: str, is_own: bool) -> None:
    assert bool(re.search(OWN, name)) is is_own


def test_a_program_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    child = f"import time; file = open({str(held)!r}, 'wb', 0); file.write(b'x'); time.sleep(600)"
    parent = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    ends = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for limit_s in (6.0, 30.0, 120.0):  # a busy machine starts them slowly
            output, code = run([sys.executable, "-c", parent], os.environ, limit_s)
            os.set_blocking(ends, True)
            if said := os.read(ends, 9):
                break
            os.set_blocking(ends, False)
        assert (output, code) == ("begun\n", None)
        assert [said, os.read(ends, 1)] == [b"x", b""], "the other end must be closed"
    finally:
        os.close(ends)


def test_a_program_that_ends_gives_its_status() -> None:
    assert run([sys.executable, "-c", "print('done'); raise SystemExit(3)"], os.environ, 60.0) == ("done\n", 3)
