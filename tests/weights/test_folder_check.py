"""Folders of unknown origin: no reader blocks on them, and no small file makes one use much memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mstar_core.errors import ExitCode, WeightsError
from mstar_core.weights.checkpoint import Checkpoint
from mstar_core.weights.files import checked_folder, damage
from mstar_core.weights.folder_check import check_folder

NESTED = b"[" * 200_000 + b"]" * 200_000


def header(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")


def device(folder: Path) -> None:
    (folder / "config.json").symlink_to("/dev/zero")


def nested_header(folder: Path) -> None:
    header(folder / "model.safetensors", b'{"a": ' + NESTED + b"}")


def nested_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"a": ' + NESTED + b"}")


def nested_for_python(folder: Path) -> None:
    """Nest deeper than functions of Python may call each other; the JSON reader of Python 3.12 takes more."""
    (folder / "config.json").write_bytes(b"[" * 1200 + b"]" * 1200)


def many_layers(folder: Path) -> None:
    (folder / "config.json").write_text('{"text_config": {"num_hidden_layers": 1e9}}')


def wide(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 10**9}))


@pytest.mark.parametrize("make", [pipe, device, nested_header, nested_config, nested_for_python, many_layers, wide])
def test_a_folder_that_no_reader_should_open_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(WeightsError, match="cannot be part of a checkpoint") as caught:
        check_folder(tmp_path)
    assert caught.value.exit_code is ExitCode.INVALID


def test_usual_folders_pass_and_damage_is_left_to_the_readers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 80, "vocab_size": 262144, "rope_theta": 1e9}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "part").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"short")
    check_folder(tmp_path)


def test_readers_report_a_header_that_nests_too_deep(tmp_path: Path) -> None:
    nested_header(tmp_path)
    assert "header cannot be read" in damage(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="cannot be read"):
        Checkpoint.find(tmp_path)


def test_a_folder_is_checked_with_its_config_before_its_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is not a folder"):
        checked_folder(tmp_path / "missing", str)
    with pytest.raises(WeightsError, match="contains no weights"):
        checked_folder(tmp_path, str)
    header(tmp_path / "model.safetensors", b"{}")
    read: list[Path] = []
    assert checked_folder(tmp_path, read.append) == tmp_path == read[0]
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsError, match="is damaged"):
        checked_folder(tmp_path, read.append)


def test_up_refuses_it_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mstarctl.main import run

    pipe(tmp_path)
    assert run(["up", "orpheus", "--weights", str(tmp_path), "--device", "cpu", "--dry-run"]) == ExitCode.INVALID
    assert "not a regular file" in capsys.readouterr().err
