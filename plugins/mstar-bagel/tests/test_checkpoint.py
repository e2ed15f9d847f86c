"""Checkpoint folders: official names and shapes, sizes, complete loading, refusals that name the file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_bagel.checkpoint.config import LLM_CONFIG, MODEL_FILE, VAE_FILE, Sizes, read_sizes
from mstar_bagel.checkpoint.weights import PATCHES
from mstar_bagel.published import names, shapes
from mstar_bagel.sources.download import check_files, needed_files
from mstar_core.errors import WeightsError

from .conftest import build, model_of


def official(golden: Any) -> dict[str, list[int]]:
    """Return every official name with its shape."""
    listed, sizes = golden.json("official_tensor_shapes.json"), Sizes()
    counts = {"{i}": sizes.language.layers, "{j}": sizes.vision.layers}
    found: dict[str, list[int]] = {}
    for file in (MODEL_FILE, VAE_FILE):
        for name, shape in listed[file].items():
            mark = next((count for count in counts if count in name), None)
            each_name = [name] if mark is None else [name.replace(mark, str(n)) for n in range(counts[mark])]
            found |= dict.fromkeys(each_name, shape)
    return found


def test_names_and_shapes_are_those_of_the_official_files(golden: Any) -> None:
    expected = official(golden)
    assert set(names(Sizes())) == set(expected)
    assert {name: list(shape) for name, shape in shapes(Sizes()).items()} == expected


def test_sizes_follow_the_files(golden: Any, reference: Any) -> None:
    sizes, config, vit = reference.sizes, golden.json("llm_config.json"), golden.json("vit_config.json")
    assert (sizes.language.width, sizes.language.layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert sizes.vision.layers == vit["num_hidden_layers"] - 1
    special = golden.cases["special_token_ids"]
    assert (sizes.ids.start, sizes.ids.end) == (special["bos_token_id"], special["eos_token_id"])
    assert (sizes.ids.image_start, sizes.ids.image_end) == (special["start_of_image"], special["end_of_image"])


def test_the_side_of_a_position_table_is_read_from_the_weights(checkpoint: Path, reference: Any) -> None:
    """Official configs carry an older side than the weights."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps(config | {"max_latent_size": 3, "vit_max_num_patch_per_side": 3})
    )
    assert read_sizes(checkpoint) == reference.sizes


def test_a_patch_embedding_stored_as_a_convolution_is_read(checkpoint: Path, reference: Any) -> None:
    weights = load_file(checkpoint / MODEL_FILE)
    vision = reference.sizes.vision
    flat = weights[PATCHES].view(-1, vision.patch, vision.patch, vision.channels)
    weights[PATCHES] = flat.permute(0, 3, 1, 2).contiguous()
    save_file(weights, checkpoint / MODEL_FILE)
    assert torch.equal(build(checkpoint).vit.state_dict()[PATCHES], reference.vit.state_dict()[PATCHES])


@pytest.mark.parametrize(
    ("file", "prefix", "node"),
    [
        (MODEL_FILE, "language_model.model.layers.0.self_attn.q_norm_moe_gen", "LLM"),
        (MODEL_FILE, "vit_pos_embed", "vit_encoder"),
        (VAE_FILE, "encoder.mid.attn_1.q", "vae_encoder"),
        (VAE_FILE, "decoder.up.0", "vae_decoder"),
    ],
)
def test_a_missing_tensor_is_an_error_of_its_node(file: str, prefix: str, node: str, checkpoint: Path) -> None:
    kept = {name: value for name, value in load_file(checkpoint / file).items() if not name.startswith(prefix)}
    save_file(kept, checkpoint / file)
    model = model_of(checkpoint)
    spec = build_spec(checkpoint)
    with pytest.raises(WeightsError, match=re.escape(prefix)):
        model.get_submodule(spec.node(node))


def build_spec(folder: Path) -> Any:
    from .conftest import SPEC

    return SPEC.bound(folder, {})


def test_a_tensor_of_another_shape_is_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / MODEL_FILE)
    weights["vae2llm.weight"] = torch.zeros(3, 5)
    save_file(weights, checkpoint / MODEL_FILE)
    with pytest.raises(WeightsError, match=r"vae2llm\.weight has shape"):
        model_of(checkpoint).get_submodule(build_spec(checkpoint).node("LLM"))


def test_weights_are_cast_to_the_dtype_of_their_node(checkpoint: Path) -> None:
    model, spec = model_of(checkpoint, torch.bfloat16), build_spec(checkpoint)
    kinds = {"LLM": torch.bfloat16, "vit_encoder": torch.bfloat16, "vae_encoder": torch.float32}
    for name, dtype in kinds.items():
        module = model.get_submodule(spec.node(name))
        assert {value.dtype for value in module.state_dict().values()} == {dtype}


def test_a_folder_is_checked_before_it_is_used(checkpoint: Path) -> None:
    check_files(checkpoint)
    whole = (checkpoint / VAE_FILE).read_bytes()
    (checkpoint / VAE_FILE).write_bytes(whole[:-10])
    with pytest.raises(WeightsError, match="is damaged"):
        check_files(checkpoint)
    (checkpoint / VAE_FILE).unlink()
    with pytest.raises(WeightsError, match=VAE_FILE):
        check_files(checkpoint)
    with pytest.raises(WeightsError, match="not a folder"):
        check_files(checkpoint / LLM_CONFIG)


@pytest.mark.parametrize(
    ("change", "named"), [({"hidden_size": None}, "hidden_size"), ({"num_hidden_layers": 0}, "num_hidden_layers")]
)
def test_a_wrong_config_names_its_key(change: dict[str, Any], named: str, checkpoint: Path) -> None:
    path = checkpoint / LLM_CONFIG
    config = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not None}
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError) as caught:
        read_sizes(checkpoint)
    assert named in f"{caught.value.title} {caught.value.detail}" and caught.value.facts["file"] == str(path)


def test_a_repository_without_the_autoencoder_is_refused(checkpoint: Path) -> None:
    listed = {path.name: path.stat().st_size for path in checkpoint.iterdir()} | {"README.md": 10, "model.bin": 5}
    assert set(needed_files(listed)) == {path.name for path in checkpoint.iterdir()} - {"README.md"}
    del listed[VAE_FILE]
    with pytest.raises(WeightsError, match=VAE_FILE):
        needed_files(listed)


def test_a_tokenizer_of_vocab_and_merges_equals_tokenizer_json(golden: Any, checkpoint: Path, tmp_path: Path) -> None:
    from mstar_bagel.request.tokenizer import TextTokenizer

    whole = TextTokenizer(checkpoint)
    (tmp_path / "parts").mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, tmp_path / "parts" / name)
    parts = TextTokenizer(tmp_path / "parts")
    for text, ids in golden.cases["tokens"].items():
        assert whole.encode(text) == ids == parts.encode(text)
