"""The generated tiny checkpoint: reproducible, complete, and speaking."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.errors import StartError
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import Checkpoint
from mstar_core.plugin.processor import PromptRequest
from mstar_core.weights.sources import STAMP
from mstar_orpheus.checkpoint.config import IDS_PER_FRAME, read_config
from mstar_orpheus.checkpoint.layout import CheckpointLayout
from mstar_orpheus.plugin import Params
from mstar_orpheus.processor import Processor
from mstar_orpheus.sources.download import checked, part_files
from mstar_orpheus.sources.tiny import write_tiny
from mstar_orpheus.vocoder.frames import misplaced
from tests.engine.exact_draw import sample

MIB = 1 << 20


def test_it_is_a_complete_checkpoint_in_the_official_layout(tiny_folder: Path) -> None:
    checked(tiny_folder)
    record = CheckpointLayout.find(tiny_folder)
    assert len(part_files(record.lm)) > 1, "sharded, to take the path of the real one"
    assert [path.name for path in part_files(record.snac)] == ["pytorch_model.bin"]
    assert sum(path.stat().st_size for path in tiny_folder.rglob("*") if path.is_file()) < 4 * MIB


def test_it_is_reproducible(tiny_folder: Path, tmp_path: Path) -> None:
    again = write_tiny(tmp_path / "again")
    for part in ("lm", "snac"):
        one, two = (dict(Checkpoint.find(folder / part).tensors()) for folder in (tiny_folder, again))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    for name in ("lm/config.json", "lm/tokenizer.json", "snac/config.json"):
        assert (again / name).read_bytes() == (tiny_folder / name).read_bytes()


def test_a_second_call_writes_nothing_and_another_version_is_replaced(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "orpheus")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_tiny(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (folder / STAMP).write_text('{"version": 0}')
    (folder / "left over").touch()
    write_tiny(folder)
    assert not (folder / "left over").exists()
    checked(folder)


def test_a_broken_folder_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "orpheus"
    (folder / "lm").mkdir(parents=True)
    assert checked(write_tiny(folder)) == folder
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        actual = pool.map(write_tiny, [tmp_path / "orpheus"] * 2)
    assert actual == [tmp_path / "orpheus"] * 2
    checked(tmp_path / "orpheus")


def test_a_folder_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="--cache-dir"):
        write_tiny(tmp_path / "file" / "orpheus")


def speak(tiny: Any, cache: Any, text: str, seed: int, limit: int = 3000) -> list[int]:
    """Return the ids of one request with the default parameters, up to the stop id."""
    params = Params()
    inputs = Processor(tiny.folder, {}).process_prompt(PromptRequest(text=text, params=params))
    prompt = torch.from_numpy(inputs.arrays["text_tokens"])
    config = read_config(tiny.folder)
    seen = torch.zeros(1, config.vocab_size, dtype=torch.bool)
    seen[0, prompt] = True
    sampling = SamplingParams(
        temperature=params.temperature, top_p=params.top_p, repetition_penalty=params.repetition_penalty, seed=seed
    )
    tokens, ids = prompt, list[int]()
    while len(ids) < limit:
        positions = torch.arange(len(prompt) + len(ids) - 1 if ids else 0, len(prompt) + len(ids))
        hidden = tiny.llama(kv=cache, positions=positions, tokens=tokens)["hidden"]
        tokens = sample(tiny.llama.head(hidden[-1:]), [sampling], seen, torch.tensor([len(ids)]))
        if int(tokens) == config.ids.stop:
            break
        ids.append(int(tokens))
        seen[0, tokens] = True
    return ids


@pytest.mark.parametrize("seed", [0, 1])
def test_speech_lasts_seconds_ends_by_itself_and_keeps_the_slot_order(seed: int, tiny: Any, dense_cache: Any) -> None:
    ids = speak(tiny, dense_cache, "Hello there, this is a test.", seed)
    config = read_config(tiny.folder)
    seconds = len(ids) / IDS_PER_FRAME * config.frame_samples / config.sample_rate
    assert 1.0 < seconds < 20.0
    assert all(token in config.audio_ids for token in ids)
    assert not misplaced(np.array(ids)[None], config.ids.audio_offset, config.codebook_size).any()


def test_its_sound_is_audible_and_below_full_scale(tiny: Any) -> None:
    config = read_config(tiny.folder)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(config.codebook_size, (2, 28), generator=generator)
    window = config.ids.audio_offset + (torch.arange(28) % IDS_PER_FRAME) * config.codebook_size + codes
    samples = tiny.vocoder.decode(window, None)
    assert 0.05 < float(samples.square().mean().sqrt()) < 0.4
    assert float(samples.abs().max()) < 0.999
