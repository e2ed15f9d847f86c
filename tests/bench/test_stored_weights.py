"""Weight files of real size: the loader reads them, and every tensor has its name, shape and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.families import stored_weights
from bench.families.stored_weights import place_for, size_of, write_shards
from mstar_core.layers import Checkpoint
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.published import shapes
from mstar_qwen3omni.sources.tiny import write_tiny


def test_files_of_a_limited_size_hold_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dict(shapes(read_config(write_tiny(tmp_path / "tiny"))))
    monkeypatch.setattr(stored_weights, "SHARD_BYTES", size_of(wanted) // 3)
    (tmp_path / "files").mkdir()
    files = write_shards(tmp_path / "files", wanted)
    assert len(files) >= 3 and all(path.stat().st_size < size_of(wanted) // 2 for path in files)
    found = dict(Checkpoint.find(tmp_path / "files").tensors())
    assert {name: tuple(value.shape) for name, value in found.items()} == wanted
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    whole = torch.cat([value.float().flatten() for value in found.values()])
    assert whole.std().item() == pytest.approx(stored_weights.DEVIATION, rel=0.05)


def test_a_file_longer_than_the_block_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "BLOCK_BYTES", 1 << 12)
    stored_weights._block.cache_clear()
    write_shards(tmp_path, {"a": (64, 100), "b": (7,)}, dtype="F32")
    stored_weights._block.cache_clear()
    found = dict(Checkpoint.find(tmp_path).tensors())
    numbers = torch.cat([found["a"].flatten(), found["b"]])
    assert len(numbers) == 6407 and torch.equal(numbers[1024:2048], numbers[:1024])
    assert torch.equal(numbers[-263:], numbers[:263])


def test_files_that_do_not_fit_into_memory_go_to_the_disk(tmp_path: Path) -> None:
    assert place_for(1 << 60, tmp_path) == tmp_path
