"""Checkpoints in every published layout fill the same modules; missing, damaged and unknown tensors are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar_core.errors import WeightsError
from mstar_vjepa2.checkpoint.config import RELEASED_AC, read_action, read_base
from mstar_vjepa2.checkpoint.files import has_pooler
from mstar_vjepa2.checkpoint.names import hub_names, official_ac_names, plain
from mstar_vjepa2.published import key_map

from .conftest import Golden, build, classifier_weights, lay_out

BASE_NODES = ("video_encoder", "predictor")


def same(one: dict[str, Any], other: dict[str, Any], names: Any) -> bool:
    def states(nodes: dict[str, Any]) -> list[Tensor]:
        return [value for name in names for value in nodes[name].state_dict().values()]

    return all(torch.equal(a, b) for a, b in zip(states(one), states(other), strict=True))


def official_base(base: Golden) -> dict[str, Any]:
    """Return the base model in the official layout: the set's own file, or one made from the hub's layout."""
    path = base.folder / "official_layout.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    weights, parts = base.tensors("model"), {"encoder": {}, "predictor": {}}
    for name, value in weights.items():
        part, rest = name.split(".", 1)
        rest = rest.replace("embeddings.patch_embeddings.", "patch_embed.").replace("attention.proj", "attn.proj")
        if part == "predictor":
            rest = rest.replace("embeddings.predictor_embeddings", "predictor_embed").replace(
                "layer.", "predictor_blocks."
            )
            rest = re.sub(
                r"^(layernorm|proj)\.", lambda m: f"predictor_{'norm' if m[1] == 'layernorm' else 'proj'}.", rest
            )
        rest = rest.replace("layernorm", "norm").replace("layer.", "blocks.")
        if rest.endswith("mask_tokens"):
            parts[part] |= {f"module.backbone.mask_tokens.{i}": each.clone() for i, each in enumerate(value)}
        elif "attention.query" in rest:
            three = [weights[name.replace("query", third)] for third in ("query", "key", "value")]
            parts[part][f"module.backbone.{rest.replace('attention.query', 'attn.qkv')}"] = torch.cat(three)
        elif "attention." not in rest:
            parts[part][f"module.backbone.{rest}"] = value
    return {**parts, "opt": {"state": {}}, "scaler": None, "epoch": 1, "loss": 0.5}


def official_ac(ac: Golden) -> dict[str, Any]:
    path = ac.folder / "official_layout.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    parts: dict[str, dict[str, Tensor]] = {"encoder": {}, "predictor": {}}
    for name, value in ac.tensors("model").items():
        part, rest = name.split(".", 1)
        parts[part][f"module.{rest}"] = value.clone()
    wrong = {name: torch.zeros_like(value) for name, value in list(parts["encoder"].items())[:3]}
    return {**parts, "target_encoder": wrong, "opt": {"state": {}}, "scaler": None, "epoch": 1, "loss": 0.5, "lr": 1e-4}


def test_names_with_and_without_the_prefix(base: Golden, base_nodes: dict[str, Any], tmp_path: Path) -> None:
    bare = base.tensors("model") | base.tensors("classifier")
    nodes = build("vjepa2", lay_out(tmp_path / "bare", base.json("config.json"), bare))
    assert same(nodes, base_nodes, (*BASE_NODES, "pooler"))


def test_a_backbone_without_a_pooler(base: Golden, base_nodes: dict[str, Any], tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "bare", base.json("config.json"), base.tensors("model"))
    nodes = build("vjepa2", folder)
    assert same(nodes, base_nodes, BASE_NODES)
    assert not has_pooler(folder) and not list(nodes["pooler"].parameters())


def test_shards(base: Golden, base_nodes: dict[str, Any], tmp_path: Path) -> None:
    folder, weights = lay_out(tmp_path / "shards", base.json("config.json")), classifier_weights(base)
    names, where = sorted(weights), {}
    for number in range(3):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[number::3]}, folder / file)
        where |= dict.fromkeys(names[number::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert has_pooler(folder)
    assert same(build("vjepa2", folder), base_nodes, (*BASE_NODES, "pooler"))


def test_the_official_file_of_the_base_model(base: Golden, base_nodes: dict[str, Any], tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "pt", base.json("config.json"))
    torch.save(official_base(base), folder / "vitx.pt")
    assert same(build("vjepa2", folder), base_nodes, BASE_NODES)


def test_wrappers_anywhere_in_a_name_and_old_tables_of_positions(
    base: Golden, base_nodes: dict[str, Any], tmp_path: Path
) -> None:
    whole = official_base(base)
    for part in ("encoder", "predictor"):
        whole[part] = {
            f"backbone.{name.replace('module.', '').replace('backbone.', '')}": v for name, v in whole[part].items()
        }
    whole["encoder"]["module.pos_embed"] = torch.zeros(1, 4, 4)
    whole["predictor"]["backbone.module.predictor_pos_embed"] = torch.zeros(1, 4, 4)
    folder = lay_out(tmp_path / "pt", base.json("config.json"))
    torch.save(whole, folder / "x.pt")
    assert same(build("vjepa2", folder), base_nodes, BASE_NODES)


def test_the_official_file_of_the_action_model(ac: Golden, ac_nodes: dict[str, Any], tmp_path: Path) -> None:
    """The file contains an unused second encoder and an unused extrinsics encoder."""
    folder = lay_out(tmp_path / "pt", ac.json("config.json"))
    torch.save(official_ac(ac), folder / "vjepa2-ac-vitg.pt")
    assert same(build("vjepa2_ac", folder), ac_nodes, ("video_encoder", "ac_predictor"))


def test_a_converted_action_model(ac: Golden, ac_nodes: dict[str, Any], tmp_path: Path) -> None:
    named = {
        name.replace("predictor.", "ac_predictor.", 1) if name.startswith("predictor.") else name: value
        for name, value in ac.tensors("model").items()
    }
    nodes = build("vjepa2_ac", lay_out(tmp_path / "c", ac.json("config.json"), named))
    assert same(nodes, ac_nodes, ("video_encoder", "ac_predictor"))


def test_progress_ends_with_all_bytes(ac: Golden, tmp_path: Path) -> None:
    from mstar_vjepa2.checkpoint.loading import Source, fill
    from mstar_vjepa2.checkpoint.names import ACTION
    from mstar_vjepa2.model import AC_RULES

    folder = lay_out(tmp_path / "pt", ac.json("config.json"))
    torch.save(official_ac(ac), folder / "a.pt")
    seen: list[tuple[int, int, str]] = []
    node = build("vjepa2_ac", folder)["ac_predictor"]
    fill(node, Source.find(folder), ACTION, AC_RULES, lambda *told: seen.append(told))
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for value in node.parameters())
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("encoder.layer.1.attention.key.bias"), "lacks blocks.1.attn.qkv.bias"),
        (lambda w: w.pop("encoder.layernorm.weight"), "lacks norm.weight"),
        (lambda w: w.update({"encoder.layer.9.mlp.fc1.bias": torch.zeros(4)}), "no place"),
        (lambda w: w.update({"surprise": torch.zeros(4)}), "surprise, which has no place"),
        (lambda w: w.update({"encoder.layer.0.norm1.bias": torch.zeros(7)}), r"shape \[7\]"),
        (lambda w: w.update({"encoder.layer.0.attention.query.bias": torch.zeros(7)}), r"shape \[7\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, message: str, base: Golden, tmp_path: Path) -> None:
    weights = base.tensors("model")
    change(weights)
    with pytest.raises(WeightsError, match=message):
        build("vjepa2", lay_out(tmp_path / "odd", base.json("config.json"), weights))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no archive", b"\x80\x04"])
def test_a_damaged_official_file_is_named(data: bytes, base: Golden, tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "bad", base.json("config.json"))
    (folder / "vitx.pt").write_bytes(data)
    with pytest.raises(WeightsError, match=r"vitx\.pt"):
        build("vjepa2", folder)


def test_an_official_file_with_code_in_it_is_refused(base: Golden, tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "bad", base.json("config.json"))
    torch.save({"encoder": nn.Linear(2, 2)}, folder / "vitx.pt")
    with pytest.raises(WeightsError, match=r"vitx\.pt cannot be read"):
        build("vjepa2", folder)


def test_a_cut_safetensors_file_is_named(base: Golden, tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "cut", base.json("config.json"), base.tensors("model"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        build("vjepa2", folder)


def test_a_folder_without_weights_or_with_two_sets_says_so(base: Golden, tmp_path: Path) -> None:
    folder = lay_out(tmp_path / "none", base.json("config.json"))
    with pytest.raises(WeightsError, match="one set of weights"):
        build("vjepa2", folder)
    for name in ("a.pt", "b.pt"):
        torch.save({}, folder / name)
    with pytest.raises(WeightsError, match=r"2 \.pt files"):
        build("vjepa2", folder)


def test_official_files_without_a_config_are_known_by_name(tmp_path: Path) -> None:
    for name, width, inner, crop in (("vitl", 1024, 4096, 256), ("vitg-384", 1408, 6144, 384)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.pt").touch()
        encoder = read_base(folder).encoder
        assert (encoder.vit.width, encoder.vit.inner, encoder.crop) == (width, inner, crop)
    assert read_action(tmp_path) == RELEASED_AC
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        read_base(tmp_path)


@pytest.mark.parametrize("ratio", [48 / 11, 4.3636, 4.363636363636363])
def test_the_giant_has_6144_hidden_lanes_however_its_ratio_is_written(ratio: float, tmp_path: Path) -> None:
    config = {"model_type": "vjepa2", "hidden_size": 1408, "num_attention_heads": 22, "mlp_ratio": ratio}
    assert read_base(lay_out(tmp_path / "g", config)).encoder.vit.inner == 6144


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"model_type": "videomae"}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 63}, "must be a multiple"),
        ({"crop_size": 33}, "crop_size 33"),
        ({"mlp_ratio": "four"}, "mlp_ratio"),
    ],
)
def test_a_config_of_another_model_is_named(change: dict[str, Any], message: str, base: Golden, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        read_base(lay_out(tmp_path / "odd", {**base.json("config.json"), **change}))


def test_pooler_heads_are_a_choice(base: Golden, base_folder: Path) -> None:
    heads = base.json("config.json")["num_attention_heads"]
    assert build("vjepa2", base_folder)["pooler"].cross.heads == heads
    assert build("vjepa2", base_folder, pooler_heads=heads // 2)["pooler"].cross.heads == heads // 2
    with pytest.raises(WeightsError, match="pooler_heads 7"):
        build("vjepa2", base_folder, pooler_heads=7)


def test_published_names_are_those_of_the_reference_files(base: Golden, ac: Golden) -> None:
    config, own = base.json("config.json"), ac.json("config.json")
    layers = config["num_hidden_layers"], config["pred_num_hidden_layers"]
    assert set(hub_names(*layers)) == set(base.tensors("model"))
    assert set(hub_names(*layers, config["num_pooler_layers"])) == set(classifier_weights(base))
    named = official_ac_names(own["encoder"]["num_hidden_layers"], own["ac_predictor"]["depth"])
    assert {plain(name) for name in named} == set(ac.tensors("model"))


def test_sizes_of_the_published_models() -> None:
    """Compare parameter counts with the table of models."""
    from mstar_vjepa2.checkpoint.config import released
    from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
    from mstar_vjepa2.nodes.encoder import Encoder
    from mstar_vjepa2.nodes.predictor import MaskedPredictor

    def count(module: nn.Module) -> int:
        return sum(value.numel() for value in module.parameters())

    table = {
        "vitl": (303_885_312, 22_086_016),
        "vith": (631_648_000, 22_282_880),
        "vitg": (1_012_173_952, 22_381_312),
    }
    with torch.device("meta"):
        for name, expected in table.items():
            config = released(name)
            assert (count(Encoder(config.encoder)), count(MaskedPredictor(config))) == expected
        assert count(ActionPredictor(RELEASED_AC)) == 305_220_992
    assert set(key_map()) >= {"vitl", "vitg-ssv2", "ac"}
