"""Examples without arguments: they print their usage and exit with 2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.conftest import EXAMPLES

SCRIPTS = sorted(EXAMPLES.iterdir())


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.suffix in (".py", ".mjs")], ids=lambda path: path.name
)
def test_an_example_without_arguments_says_how_it_is_called(script: Path, tmp_path: Path) -> None:
    if script.suffix == ".mjs" and shutil.which("node") is None:
        pytest.skip("runs where node is installed")
    command = ["node" if script.suffix == ".mjs" else sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert f"examples/{script.name} " in done.stderr and "Traceback" not in done.stderr
