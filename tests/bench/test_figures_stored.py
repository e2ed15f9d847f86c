"""Stored results name no folders of the machines that they were made on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.serving.figures import ROOT, write

RESULTS = ROOT / "bench" / "results"
FOLDER = re.compile(r"(?:^|[^\w:/.)-])(/(?!v1/)[\w.-]+/[\w./-]+)")
"""An absolute path of at least two parts, after anything but a host or another part. Routes of the api do not count."""


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json*")), ids=lambda path: path.name)
def test_a_stored_result_names_no_folder(path: Path) -> None:
    assert FOLDER.findall(path.read_text()) == []


def test_a_report_is_written_without_folders(tmp_path: Path) -> None:
    write(
        {"results": {"log_dir": str(tmp_path / "run"), "route": "POST /v1/chat/completions"}}, {}, tmp_path / "r.json"
    )
    content = json.loads((tmp_path / "r.json").read_text())
    assert content == {"results": {"log_dir": "run", "route": "POST /v1/chat/completions"}}
