"""`models fetch`: a complete directory, or the reason of the failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode, WeightsError
from mstarctl.plugins import Plugins
from mstarctl.start.fetch import fetch_weights

Cli = Callable[..., Any]


def test_the_miniature_is_made_once_and_its_folder_printed(tool: Cli, tmp_path: Path) -> None:
    words = ("models", "fetch", "orpheus:tiny", "--cache-dir", str(tmp_path), "-o", "json")
    (item,) = tool(*words).items
    files = {path.name for path in Path(item["folder"]).rglob("*") if path.is_file()}
    assert str(tmp_path) in item["folder"] and any(name.endswith(".safetensors") for name in files)
    assert item["bytes"] > 100_000 and tool(*words).items == [item]


def test_what_is_not_here_and_may_not_be_downloaded_is_named(
    tool: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = tool("models", "fetch", "orpheus", "--cache-dir", str(tmp_path))
    assert (said.code, "are not on this machine" in said.err) == (ExitCode.INVALID, True), said.err


def test_a_model_without_such_code_says_so(tool: Cli) -> None:
    said = tool("models", "fetch", "bagel")
    assert (said.code, "--weights DIR" in said.err) == (ExitCode.INVALID, True), said.err
    assert tool("models", "fetch", "orpheuss").code == ExitCode.NOT_FOUND
    assert tool("models", "fetch", "orpheus:large").code == ExitCode.NOT_FOUND


def test_progress_and_errors_of_a_plugin_s_code_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_weights.py").write_text(
        "def resolve(folder, cache, progress):\n"
        "    print('a library says something')\n"
        "    progress(5, 10, 'a.bin'); progress(10, 10, 'a.bin')\n"
        "    return cache\n"
        "def broken(folder, cache, progress):\n"
        "    raise ZeroDivisionError('a bug')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import dataclasses

    spec = dataclasses.replace(Plugins.discover().model("orpheus"), resolve="slow_weights:resolve")
    seen: list[tuple[int, int, str]] = []
    folder = fetch_weights(spec, variant="", cache_dir=tmp_path, show=lambda *report: seen.append(report))
    assert folder == tmp_path and seen[-1] == (10, 10, "a.bin")
    spec = dataclasses.replace(spec, resolve="slow_weights:broken")
    with pytest.raises(WeightsError, match="could not be downloaded") as failed:
        fetch_weights(spec, variant="", cache_dir=None, show=lambda *report: None)
    assert "ZeroDivisionError: a bug" in failed.value.detail


def test_a_download_without_data_ends_and_names_the_repository_and_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "still_weights.py").write_text(
        "import time\n"
        "def resolve(folder, cache, progress):\n"
        "    progress(1 << 20, 4 << 20, 'org/repo: a.bin')\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import dataclasses

    spec = dataclasses.replace(Plugins.discover().model("orpheus"), resolve="still_weights:resolve")
    seen: list[tuple[int, int, str]] = []
    with pytest.raises(WeightsError, match="org/repo: a.bin has stalled: no data from the network") as failed:
        fetch_weights(spec, variant="", cache_dir=None, show=lambda *report: seen.append(report), stall_s=1.5)
    assert "1.0 MiB of 4.0 MiB" in failed.value.detail and "HTTPS_PROXY" in failed.value.hint
    assert len(seen) >= 2, "the display goes on while nothing arrives"
