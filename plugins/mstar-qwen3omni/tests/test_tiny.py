"""The generated checkpoint: official layout, equal on every machine, a working tokenizer, answers that end."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.published import shapes
from mstar_qwen3omni.sources.tiny import write_tiny
from mstar_qwen3omni.sources.tiny_files import MERGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "qwen3_omni")


def test_the_published_names_are_those_of_the_official_repository() -> None:
    """Numbers of tensors and parameters of Qwen/Qwen3-Omni-30B-A3B-Instruct (specification sections 1 and 2)."""
    named = shapes(OmniConfig())
    assert len(named) == 28010 and sum(map(math.prod, named.values())) == 35_259_818_545


def test_the_tiny_checkpoint_has_the_official_layout(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    actual = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, "pt") as reader:
            actual |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}
    assert actual == shapes(read_config(folder)) and set(index) == set(actual)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000


def test_two_writes_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_tiny(tmp_path / "again")
    hashes = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in each.iterdir()}
        for each in (folder, again)
    ]
    assert hashes[0] == hashes[1]


def test_roles_and_special_tokens_are_one_id_each(folder: Path) -> None:
    vocab, ids = json.loads((folder / "vocab.json").read_text()), read_config(folder).ids
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in MERGES]))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for role in ("system", "user", "assistant"):
        assert tokenizer.encode(role).ids == [getattr(ids, role)]
    assert tokenizer.encode("\n").ids == [vocab["Ċ"]]
    text = "Grüße, 你好! The users say: 42%"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert sorted(map(int, added)) == list(range(len(vocab), len(vocab) + len(added)))
    assert added[str(ids.im_end)]["content"] == "<|im_end|>" and added[str(ids.tts_eos)]["content"] == "<tts_text_eod>"


def test_the_heads_prefer_printable_text_and_can_end(folder: Path) -> None:
    """Random inputs of the head: ids of media are never likely; text and speech end after some dozens of steps."""
    from mstar_core.layers import Checkpoint

    ids, codec = read_config(folder).ids, read_config(folder).codec
    names = ("thinker.lm_head.weight", "talker.codec_head.weight")
    heads = dict(Checkpoint.find(folder).tensors(names))
    generator = torch.Generator().manual_seed(1)
    for name, end, temperature in ((names[0], ids.im_end, 0.7), (names[1], codec.eos, 0.9)):
        hidden = torch.randn(2000, heads[name].shape[1], generator=generator)
        hidden[:, 0] = 1.0
        logits = hidden @ heads[name].T
        if name == names[0]:
            shares = (logits / temperature).softmax(-1)
            assert shares[:, ids.im_start].mean() < 1e-3 and shares[:, ids.image_pad].mean() < 1e-3
        else:
            real = [*range(64), end]
            shares = torch.zeros_like(logits)
            shares[:, real] = (logits[:, real] / temperature).softmax(-1)
        assert 0.005 < float(shares[:, end].mean()) < 0.2
