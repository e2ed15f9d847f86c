"""The commands of `train/`: made data, the vocabulary, and the export, as the plugin reads it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mstar_core.errors import WeightsError
from mstar_core.plugin.model import ModelContext
from mstar_core.plugin.processor import PromptRequest
from mstar_orpheus.checkpoint import shipped
from mstar_orpheus.checkpoint.config import read_config
from mstar_orpheus.model import Orpheus
from mstar_orpheus.plugin import ORPHEUS, MiniatureParams
from mstar_orpheus.processor import PROMPT, Processor
from mstar_orpheus.sources.download import checked
from mstar_orpheus.vocoder.frames import levels_from_codes

PLUGIN = Path(__file__).parents[1]
MIB = 1 << 20


def train(module: str) -> ModuleType:
    """Import a module of `train/` under a name that no other plugin uses."""
    if "orpheus_train" not in sys.modules:
        folder = PLUGIN / "train"
        spec = importlib.util.spec_from_file_location(
            "orpheus_train", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["orpheus_train"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"orpheus_train.{module}")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained checkpoint."""
    folder = tmp_path_factory.mktemp("mini") / "checkpoint"
    train("export").export(folder, None)
    return folder


def test_a_sentence_depends_on_the_seed_and_its_number_alone() -> None:
    sentences = train("sentences")
    whole = sentences.training(1, 0, 40)
    assert sentences.training(1, 20, 20) == whole[20:]
    assert sentences.training(2, 0, 40) != whole
    assert max(map(len, whole)) <= sentences.LONGEST + 1


def test_the_judges_sentences_are_not_in_the_training_text() -> None:
    sentences = train("sentences")
    text = next(each for each in sentences.training(1, 0, 50) if sentences.plain(each))
    again = sentences.training(1, 0, 50, frozenset({sentences.plain(text)}))
    assert sentences.plain(text) not in {sentences.plain(each) for each in again}


def test_near_alike_sentences_differ_in_few_words() -> None:
    sentences = train("sentences")
    for text in sentences.held_out(5, 1):
        others = sentences.near_alike(text, 9, random.Random(0))
        assert len({text, *others}) == 10
        for other in others:
            pairs = zip(text.split(), other.split(), strict=True)
            assert 1 <= sum(one != two for one, two in pairs) <= 2


def test_a_sentence_without_words_to_change_stands_among_others() -> None:
    others = train("sentences").near_alike("yes please", 9, random.Random(0))
    assert len({"yes please", *others}) == 10


@pytest.mark.skipif(importlib.util.find_spec("espeakng_loader") is None, reason="runs with espeakng-loader")
def test_data_has_the_same_bytes_for_any_number_of_processes(tmp_path: Path) -> None:
    for processes in (1, 2):
        words = (str(tmp_path / str(processes)), "--sentences", "520", "--processes", str(processes))
        path = os.pathsep.join(word for word in sys.path if word)
        subprocess.run(
            [sys.executable, "-m", "train.data", *words], cwd=PLUGIN, check=True, env={**os.environ, "PYTHONPATH": path}
        )
    one, two = (sorted((tmp_path / str(processes)).iterdir()) for processes in (1, 2))
    assert [path.name for path in one] == ["shard-00000.npz", "shard-00001.npz"]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_the_plugin_writes_the_prompt_that_training_used(exported: Path) -> None:
    vocabulary = train("vocabulary")
    ids = vocabulary.prompt("A café, <custom_token_2> costs 3.", "leo", vocabulary.tokenizer())
    params = MiniatureParams(voice="leo")
    request = PromptRequest(text="A café, 3.", params=params)
    served = Processor(exported, {}).process_prompt(request).arrays[PROMPT]
    assert served.tolist() == vocabulary.prompt("A café, 3.", "leo", vocabulary.tokenizer())
    assert len(served) == len("leo: A café, 3.".encode()) + 6
    assert vocabulary.STOP in ids, "the tokenizer knows its control tokens, which the processor reads as letters"


def test_the_export_is_a_small_checkpoint_that_the_plugin_reads(exported: Path) -> None:
    checked(exported)
    config = read_config(exported)
    assert config.audio_ids.stop == config.vocab_size
    assert sum(path.stat().st_size for path in exported.rglob("*") if path.is_file()) < 6 * MIB
    assert ORPHEUS.bound(exported, {}).params is MiniatureParams


def test_served_logits_are_those_of_the_trained_model(exported: Path) -> None:
    spec = ORPHEUS.bound(exported, {})
    model = Orpheus(ModelContext(spec=spec, folder=exported, device=torch.device("cpu"), dtype=torch.float32))
    served = model.get_submodule(spec.node("LLM"))
    torch.manual_seed(0)
    trained = train("llama").Llama()
    for weight in trained.parameters():
        weight.data = weight.data.bfloat16().float()
    ids = torch.randint(trained.model.embed_tokens.num_embeddings, (1, 30))
    positions = torch.arange(30)[None]
    expected = trained.logits(ids, positions, torch.zeros_like(ids))[0]
    hidden = served(kv=train("local").Cache(), positions=positions[0], tokens=ids[0])["hidden"]
    assert torch.allclose(served.head(hidden), expected, atol=1e-4)


def test_a_row_of_sentences_gives_each_the_logits_that_it_has_alone() -> None:
    llama = train("llama")
    torch.manual_seed(0)
    model = llama.Llama()
    ids = torch.randint(4000, (1, 20)) % model.model.embed_tokens.num_embeddings
    positions = torch.tensor([[*range(12), *range(8)]])
    documents = torch.tensor([[0] * 12 + [1] * 8])
    both = model.logits(ids, positions, documents)[0, 12:]
    alone = model.logits(ids[:, 12:], positions[:, 12:], documents[:, 12:])[0]
    assert torch.allclose(both, alone, atol=1e-5)


def test_the_exported_vocoder_sounds_like_the_trained_one() -> None:
    from mstar_orpheus.vocoder.snac import Snac, decoding_weights

    torch.manual_seed(3)
    trained = Snac(train("codec_parts").MINI_SNAC)
    loaded = Snac(trained.config)
    loaded.load_state_dict(decoding_weights(train("export").normalized(trained)))
    codes = torch.randint(trained.config.codebook_size, (1, 28))
    assert torch.allclose(trained.decode(levels_from_codes(codes)), loaded.decode(levels_from_codes(codes)), atol=1e-5)


def test_codes_are_stored_in_the_order_that_the_vocoder_reads() -> None:
    codes = torch.arange(14)[None]
    assert torch.equal(train("codec").in_slots(list(levels_from_codes(codes))), codes)


def test_training_in_streaming_windows_decodes_what_serving_sends() -> None:
    codec, parts = train("codec"), train("codec_parts")
    torch.manual_seed(4)
    snac = parts.Snac(parts.MINI_SNAC)
    for block in snac.modules():
        if type(block).__name__ == "NoiseBlock":
            block.linear.weight.zero_()
    codes = torch.randint(512, (1, 5 * 7))
    streamed = codec.streamed(snac, snac.latent(levels_from_codes(codes)))
    windows = codes[0].unfold(0, 28, 7)
    served = snac.decode(levels_from_codes(windows), None, (2048, 4096))
    assert torch.allclose(streamed.flatten(), served.flatten(), atol=1e-5)


def test_packing_loses_no_sentence_and_overfills_no_row() -> None:
    lm = train("lm")
    lengths = np.random.default_rng(0).integers(50, lm.LENGTH, 300).tolist()
    packs = list(lm.packed(lengths))
    assert sorted(index for pack in packs for index in pack) == list(range(300))
    assert all(sum(lengths[index] for index in pack) <= lm.LENGTH for pack in packs)


def test_word_errors_count_changes_additions_and_omissions() -> None:
    word_errors = train("recognizer").word_errors
    expected = "the red fox ran".split()
    assert word_errors(expected, expected) == 0
    assert word_errors(expected, "the fox ran away".split()) == 2
    assert word_errors(expected, []) == 4


def test_the_miniature_is_refused_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(WeightsError, match="orpheus:mini has no weights"):
        shipped.find_mini(tmp_path)
