"""Checkpoints: layouts, heads, dtypes, damaged files, the full-size key lists."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mstar_core.errors import ConfigError, WeightsError
from mstar_core.layers import AttentionSpec, RotarySpec
from mstar_core.parallel.shards import Shard
from mstar_core.plugin.model import ModelContext
from mstar_orpheus.checkpoint.config import SpecialIds, read_config
from mstar_orpheus.checkpoint.layout import CheckpointLayout
from mstar_orpheus.llama import HEAD_KEY, Llama, LlamaConfig
from mstar_orpheus.model import Orpheus
from mstar_orpheus.plugin import OFFICIAL, ORPHEUS
from mstar_orpheus.sources.download import part_files


def build(folder: Path, node: str = "LLM", **changes: Any) -> Any:
    spec = ORPHEUS.bound(folder, {})
    options = {"spec": spec, "folder": folder, "device": torch.device("cpu"), "dtype": torch.float32} | changes
    return Orpheus(ModelContext(**options)).get_submodule(spec.node(node))


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "lm" / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "lm" / "model.safetensors")


def reconfigure(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_llm_may_be_in_the_folder_itself_with_the_vocoder_below(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint / "lm", other)
    shutil.copytree(checkpoint / "snac", other / "snac_24khz")
    assert CheckpointLayout.find(other) == CheckpointLayout(lm=other, snac=other / "snac_24khz")
    assert read_config(other) == read_config(checkpoint)


@pytest.mark.parametrize("part", ["lm", "snac"])
def test_a_missing_part_is_an_error_with_the_paths_tried(part: str, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / part)
    with pytest.raises(WeightsError) as caught:
        read_config(checkpoint)
    assert str(checkpoint / part / "config.json") in str(caught.value)


def test_shards_with_an_index_equal_the_single_file(checkpoint: Path, reference: Any) -> None:
    tensors, folder = state(checkpoint), checkpoint / "lm"
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same(build(checkpoint), reference.llama)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00002"):
        part_files(folder)


def assert_same(left: Any, right: Any) -> None:
    mine, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_pickled_weights_are_read_as_weights_only(checkpoint: Path, reference: Any) -> None:
    torch.save(state(checkpoint), checkpoint / "lm" / "pytorch_model.bin")
    (checkpoint / "lm" / "model.safetensors").unlink()
    assert_same(build(checkpoint), reference.llama)


class Planted:
    """An object of a hostile file, which runs a call when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"x": Planted(tmp_path / "ran")}, checkpoint / "snac" / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin"):
        build(checkpoint, "snac_decoder")
    assert not (tmp_path / "ran").exists()


def test_float32_exports_are_cast_to_the_nodes_dtype(checkpoint: Path) -> None:
    llama = build(checkpoint, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert llama.model.rotary.frequencies.dtype == torch.float32
    vocoder = build(checkpoint, "snac_decoder", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in vocoder.parameters()} == {torch.float32}


def test_a_head_of_its_own_is_used_only_when_the_config_does_not_tie(checkpoint: Path) -> None:
    tensors = state(checkpoint)
    tensors[HEAD_KEY] = tensors["model.embed_tokens.weight"] * 2
    rewrite(checkpoint, tensors)
    width = tensors[HEAD_KEY].shape[1]
    hidden = torch.linspace(-1, 1, width)[None]
    reconfigure(checkpoint / "lm" / "config.json", tie_word_embeddings=True)
    tied = build(checkpoint).head(hidden)
    reconfigure(checkpoint / "lm" / "config.json", tie_word_embeddings=False)
    torch.testing.assert_close(build(checkpoint).head(hidden), 2 * tied)


def test_a_missing_head_shares_the_embedding_even_when_the_config_does_not_tie(checkpoint: Path) -> None:
    rewrite(checkpoint, {name: value for name, value in state(checkpoint).items() if name != HEAD_KEY})
    hidden = torch.ones(1, state(checkpoint)["model.norm.weight"].shape[0])
    reconfigure(checkpoint / "lm" / "config.json", tie_word_embeddings=True)
    expected = build(checkpoint).head(hidden)
    reconfigure(checkpoint / "lm" / "config.json", tie_word_embeddings=False)
    assert torch.equal(build(checkpoint).head(hidden), expected)


@pytest.mark.parametrize("kept", [4, 200, 5000])
def test_a_truncated_safetensors_file_is_named(kept: int, checkpoint: Path) -> None:
    path = checkpoint / "lm" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors (is truncated|cannot be read)"):
        build(checkpoint)


def test_a_truncated_pickle_is_named(checkpoint: Path) -> None:
    path = checkpoint / "snac" / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin cannot be read"):
        build(checkpoint, "snac_decoder")


def test_a_missing_an_unknown_and_a_misshapen_tensor_are_each_named(checkpoint: Path) -> None:
    whole, name = state(checkpoint), "model.layers.0.mlp.up_proj.weight"
    rewrite(checkpoint, {key: value for key, value in whole.items() if key != name})
    with pytest.raises(WeightsError, match=name):
        build(checkpoint)
    rewrite(checkpoint, whole | {"model.layers.0.mlp.sideways.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match="sideways"):
        build(checkpoint)
    rewrite(checkpoint, whole | {name: whole[name][:-1].contiguous()})
    with pytest.raises(WeightsError, match=name):
        build(checkpoint)


def test_snac_weights_that_lack_a_tensor_are_named(checkpoint: Path) -> None:
    path = checkpoint / "snac" / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    lost = max(name for name in tensors if name.startswith("decoder.") and name.endswith(".alpha"))
    del tensors[lost]
    torch.save(tensors, path)
    with pytest.raises(WeightsError, match=re.escape(lost)):
        build(checkpoint, "snac_decoder")


def test_progress_reaches_the_total(checkpoint: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    build(checkpoint, progress=lambda done, total, file: seen.append((done, total, file)))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1] == (checkpoint / "lm" / "model.safetensors").stat().st_size


def test_each_rank_of_a_group_reads_its_part_of_the_weights(checkpoint: Path) -> None:
    whole = dict(build(checkpoint).named_parameters())
    ranks = [dict(build(checkpoint, shard=Shard(index=index, size=2)).named_parameters()) for index in range(2)]
    for name, value in whole.items():
        if name.endswith("norm.weight") or "layernorm" in name:
            assert all(torch.equal(rank[name], value) for rank in ranks), name
            continue
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        joined = torch.cat([rank[name] for rank in ranks], dim=dim)
        assert torch.equal(joined.narrow(dim, 0, value.shape[dim]), value), name
        assert not joined.narrow(dim, value.shape[dim], joined.shape[dim] - value.shape[dim]).any(), name


def test_a_size_that_does_not_divide_the_heads_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="tp_size 3 does not divide"):
        build(checkpoint, shard=Shard(size=3))


def test_special_ids_must_be_complete_and_fit_the_vocabulary(checkpoint: Path) -> None:
    path = checkpoint / "lm" / "config.json"
    inputs = json.loads(path.read_text())["orpheus"]
    reconfigure(path, orpheus={key: value for key, value in inputs.items() if key != "stop_token_id"})
    with pytest.raises(WeightsError, match="stop_token_id"):
        read_config(checkpoint)
    if json.loads(path.read_text())["vocab_size"] > SpecialIds().audio_offset:
        pytest.skip("runs when MSTAR_GOLDEN names a set whose vocabulary is smaller than the official one")
    reconfigure(path, orpheus=None)  # the official ids, above this vocabulary
    with pytest.raises(WeightsError, match=str(SpecialIds().audio_offset)):
        read_config(checkpoint)


def test_full_size_names_and_shapes_fit_the_decoder(golden: Any) -> None:
    listed = golden.json("full_size_keys.json")["llm"]
    vocab, width = listed["model.embed_tokens.weight"]
    layers = 1 + max(int(name.split(".")[2]) for name in listed if name.startswith("model.layers."))
    kv_width, mlp = (listed[f"model.layers.0.{name}.weight"][0] for name in ("self_attn.k_proj", "mlp.gate_proj"))
    heads = width // OFFICIAL.head_dim
    config = LlamaConfig(
        vocab=vocab,
        mlp=mlp,
        layers=layers,
        rotary=RotarySpec(width=OFFICIAL.head_dim),
        norm_eps=1e-5,
        ties=False,
        attention=AttentionSpec(
            width=width, heads=heads, kv_heads=kv_width // OFFICIAL.head_dim, head_dim=OFFICIAL.head_dim
        ),
    )
    for has_head in (True, False):
        with torch.device("meta"):
            own = {name: list(value.shape) for name, value in Llama(config, has_head=has_head).named_parameters()}
        assert own == {name: shape for name, shape in listed.items() if has_head or name != HEAD_KEY}
    assert (vocab, layers, kv_width) == (OFFICIAL.vocab_size, OFFICIAL.layers, OFFICIAL.kv_heads * OFFICIAL.head_dim)


@pytest.mark.parametrize("ties", [True, False])
def test_a_restricted_head_has_the_rows_of_the_speech_ids(checkpoint: Path, ties: bool) -> None:
    tensors = state(checkpoint)
    tensors[HEAD_KEY] = tensors["model.embed_tokens.weight"] * 2
    rewrite(checkpoint, tensors)
    reconfigure(checkpoint / "lm" / "config.json", tie_word_embeddings=ties)
    spec = ORPHEUS.bound(checkpoint, {"restrict_vocabulary": True})
    context = ModelContext(spec=spec, folder=checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    model, node = Orpheus(context), spec.node("LLM")
    llama = model.get_submodule(node)
    assert node.sampling is not None
    ids = [token for span in node.sampling.vocabulary for token in span]
    vocab, width = tensors["model.embed_tokens.weight"].shape
    hidden = torch.linspace(-1, 1, 3 * width).view(3, width)
    torch.testing.assert_close(llama.head(hidden), build(checkpoint).head(hidden)[:, ids])
    assert len(ids) < vocab == model.vocab_size(node)
    assert llama.model.embed_tokens.weight.shape == (vocab, width)
