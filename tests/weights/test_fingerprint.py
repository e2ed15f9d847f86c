"""Fingerprint of a checkpoint folder: equal for copies, different for other weights of the same shapes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar_core.weights.fingerprint import BLOCK_BYTES, HEAD_BYTES, fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "one"
    (made / "part").mkdir(parents=True)
    (made / "config.json").write_text('{"layers": 2}')
    (made / "part" / "model.safetensors").write_bytes(os.urandom(3 * HEAD_BYTES))
    return made


def test_a_copy_with_other_notes_and_links_is_the_same(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "two"
    shutil.copytree(folder, copy)
    weights = copy / "part" / "model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    (copy / "README.md").write_text("a note")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "state.json").write_text("{}")
    assert fingerprint(copy) == fingerprint(folder)


def other_values(folder: Path) -> None:
    path = folder / "part" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[HEAD_BYTES:] = os.urandom(len(data) - HEAD_BYTES)
    path.write_bytes(data)


def last_byte(folder: Path) -> None:
    path = folder / "part" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-BLOCK_BYTES] ^= 1
    path.write_bytes(data)


def config(folder: Path) -> None:
    (folder / "config.json").write_text('{"layers": 3}')


def another_file(folder: Path) -> None:
    (folder / "part" / "more.safetensors").write_bytes(b"x")


def another_name(folder: Path) -> None:
    (folder / "config.json").rename(folder / "configuration.json")


@pytest.mark.parametrize("change", [other_values, last_byte, config, another_file, another_name])
def test_other_weights_differ(change: Callable[[Path], None], folder: Path) -> None:
    before = fingerprint(folder)
    change(folder)
    assert fingerprint(folder) != before
