"""Checkpoints of the hub: chosen files and their cache; and those that a package contains: `NAME:mini`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.files.load import split_name
from mstar_core.errors import NotFound, WeightsError
from mstar_core.weights.sources import HuggingFace, cached_checkpoint, chosen_files, shipped_checkpoint


def test_a_name_selects_an_embedded_checkpoint() -> None:
    assert split_name("pi05:mini") == ("pi05", "mini")
    assert split_name("pi05:tiny") == ("pi05", "tiny")
    assert split_name("pi05") == ("pi05", "")
    with pytest.raises(NotFound, match="no variant 'minis'") as refused:
        split_name("pi05:minis")
    assert "mini" in refused.value.hint


def test_a_package_without_weights_refuses_its_miniature(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights in this package") as refused:
        shipped_checkpoint(tmp_path, "pi05:mini")
    assert "train/" in refused.value.hint
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert shipped_checkpoint(tmp_path, "pi05:mini") == tmp_path


LISTED = {"config.json": 1, "model.safetensors": 2, "README.md": 3, "original/params.json": 4, "assets/a/stats.json": 5}
NEEDED = {"config.json": "config", "*.safetensors": "weights"}


def test_files_are_chosen_by_pattern_and_folders_only_by_name() -> None:
    chosen = chosen_files("a/b", LISTED, ("*.json", "*.safetensors", "assets/*stats.json"), NEEDED, "use --weights DIR")
    assert chosen == {"config.json": 1, "model.safetensors": 2, "assets/a/stats.json": 5}


def test_a_repository_without_a_needed_file_is_refused_with_the_way_out() -> None:
    with pytest.raises(WeightsError, match="a/b contains no weights") as refused:
        chosen_files("a/b", {"config.json": 1, "old/model.safetensors": 2}, NEEDED, NEEDED, "use --weights DIR")
    assert refused.value.hint == "use --weights DIR" and "lists 2 files" in refused.value.detail


class Cache(HuggingFace):
    """A hub whose cache is one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cached(self, repo: str, file: str) -> Path | None:
        return self._folder / file if (self._folder / file).is_file() else None


def test_a_cached_checkpoint_is_checked_and_its_first_missing_file_is_named(tmp_path: Path) -> None:
    seen: list[Path] = []

    def check(folder: Path) -> Path:
        seen.append(folder)
        return folder

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"tokenizer\.json of a/b is missing"):
        cached_checkpoint(Cache(tmp_path), "a/b", ("config.json", "tokenizer.json"), check, "use --weights DIR")
    assert not seen
    assert (
        cached_checkpoint(Cache(tmp_path), "a/b", ("config.json",), check, "use --weights DIR") == tmp_path == seen[0]
    )
