"""Both published layouts, missing or foreign weights, and the names of the full-size model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mstar_core.errors import WeightsError
from mstar_core.parallel.shards import Shard
from mstar_pi05.checkpoint.config import Sizes
from mstar_pi05.checkpoint.weights import BOTH, PALIGEMMA, TIED
from mstar_pi05.published import names, policy_target, shapes

TABLE = f"{PALIGEMMA}language_model.embed_tokens.weight"
HEAD = f"{TIED}weight"
EXPERT = f"{BOTH}gemma_expert.model."


def rewritten(folder: Path, change: Any) -> Path:
    """Return the checkpoint with other keys."""
    path = folder / "model.safetensors"
    weights = change(load_file(path))
    save_file({name: value.contiguous() for name, value in weights.items()}, path)
    return folder


def loaded(models: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = models(folder)
    return model.policy().state_dict(), model.cameras().state_dict()


def assert_same(models: Any, folder: Path, reference: Any) -> None:
    wanted = reference.policy.state_dict(), reference.cameras.state_dict()
    for made, expected in zip(loaded(models, folder), wanted, strict=True):
        expected = {name: value for name, value in expected.items() if not name.startswith("table.")}
        assert set(made) == set(expected)
        assert all(torch.equal(made[name], expected[name]) for name in expected)


def renamed(old: str, new: str) -> Any:
    return lambda weights: {name.replace(old, new): value for name, value in weights.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {f"model.{name}": value for name, value in weights.items()},
        renamed(HEAD, TABLE),
        lambda weights: {**weights, TABLE: weights[HEAD].clone()},
        lambda weights: {f"model.{name}": value for name, value in renamed(HEAD, TABLE)(weights).items()},
        renamed("time_mlp_", "action_time_mlp_"),
        renamed("vision_tower.vision_model.", "vision_tower."),
        lambda weights: {**weights, "state_proj.weight": torch.zeros(3, 3), "state_proj.bias": torch.zeros(3)},
        lambda weights: {**weights, "some.other": torch.zeros(3), f"{PALIGEMMA}language_model.odd": torch.zeros(1)},
        lambda weights: {name: value for name, value in weights.items() if "gemma_expert.lm_head" not in name},
    ],
    ids=[
        "saved again",
        "table under its own name",
        "table under both names",
        "saved again, own name",
        "older time names",
        "a level less",
        "a state vector of pi0",
        "unknown extras",
        "no unused head",
    ],
)
def test_every_layout_gives_the_same_model(change: Any, checkpoint: Path, reference: Any, models: Any) -> None:
    assert_same(models, rewritten(checkpoint, change), reference)


def test_a_sharded_checkpoint_gives_the_same_model(checkpoint: Path, reference: Any, models: Any) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    ordered = sorted(weights)
    where = {}
    for number, part in enumerate((ordered[::2], ordered[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, checkpoint / file)
        where |= dict.fromkeys(part, file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same(models, checkpoint, reference)


@pytest.mark.parametrize(
    "key",
    [
        HEAD,
        "action_in_proj.bias",
        "time_mlp_out.weight",
        f"{EXPERT}norm.dense.bias",
        f"{EXPERT}layers.1.input_layernorm.dense.weight",
        f"{PALIGEMMA}language_model.layers.0.self_attn.k_proj.weight",
        f"{PALIGEMMA}multi_modal_projector.linear.bias",
        f"{PALIGEMMA}vision_tower.vision_model.embeddings.position_embedding.weight",
    ],
)
def test_a_missing_tensor_is_fatal_and_named(key: str, checkpoint: Path, models: Any) -> None:
    rewritten(checkpoint, lambda weights: {name: value for name, value in weights.items() if name != key})
    target = policy_target(key)
    assert target is not None
    with pytest.raises(WeightsError, match=target.partition(".")[2].replace(".", r"\.")):
        loaded(models, checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path, models: Any) -> None:
    rewritten(checkpoint, lambda weights: {**weights, "action_in_proj.bias": torch.zeros(7)})
    with pytest.raises(WeightsError, match="action_in_proj.bias has shape"):
        loaded(models, checkpoint)


@pytest.mark.parametrize("lead", ["", "model."])
def test_pi0_is_refused_by_name(lead: str, checkpoint: Path, models: Any) -> None:
    def as_pi0(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {f"{lead}{name}": value for name, value in weights.items() if ".dense." not in name}
        norms = {name.replace("dense.", ""): value[:4, 0] for name, value in weights.items() if "dense.weight" in name}
        return {**kept, **{f"{lead}{name}": value.clone() for name, value in norms.items()}}

    rewritten(checkpoint, as_pi0)
    with pytest.raises(WeightsError, match="pi0, not pi0.5"):
        loaded(models, checkpoint)


def test_a_config_of_pi0_is_refused(checkpoint: Path, models: Any) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"type": "pi0", "chunk_size": 50}))
    with pytest.raises(WeightsError, match="'pi0'"):
        models(checkpoint)


def test_the_unused_extras_are_told_once(checkpoint: Path, models: Any, caplog: Any) -> None:
    rewritten(checkpoint, lambda weights: {**weights, "odd.one": torch.zeros(1)})
    model = models(checkpoint)
    model.cameras()
    assert ["odd.one" in record.message for record in caplog.records] == [True]
    caplog.clear()
    models(checkpoint).policy()
    assert len(caplog.records) == 1


def test_halved_weights_keep_norms_and_small_matrices_wide(checkpoint: Path, models: Any) -> None:
    policy = models(checkpoint, torch.bfloat16).policy()
    wide = {name for name, value in policy.state_dict().items() if value.dtype == torch.float32}
    assert {name for name in policy.state_dict() if "norm" in name or "action_" in name or "time." in name} == wide
    assert policy.language.embed_tokens.weight.dtype == torch.bfloat16
    cameras = models(checkpoint, torch.bfloat16).cameras()
    assert {value.dtype for value in cameras.state_dict().values()} == {torch.float32}


def test_each_rank_of_a_group_holds_its_heads_and_all_share_the_only_key_head(checkpoint: Path, models: Any) -> None:
    whole = models(checkpoint).policy().language.layers[0].self_attn
    model = models(checkpoint)
    ranks = []
    for index in range(2):
        object.__setattr__(model._ctx, "shard", Shard(index=index, size=2))
        ranks.append(model.policy().language.layers[0].self_attn)
    assert torch.equal(torch.cat([rank.q_proj.weight for rank in ranks]), whole.q_proj.weight)
    assert torch.equal(torch.cat([rank.o_proj.weight for rank in ranks], dim=1), whole.o_proj.weight)
    assert all(torch.equal(rank.k_proj.weight, whole.k_proj.weight) for rank in ranks)


# -- the full-size model --------------------------------------------------------------------------------------------


def test_the_published_names_are_those_of_the_official_files(golden: Any) -> None:
    listed = set(golden.json("full_size_keys.json"))
    assert listed - set(names(Sizes())) == {TABLE}  # the tied table's second name, of which files hold one
    assert set(names(Sizes())) <= listed


def test_every_full_size_tensor_fits_its_place(golden: Any) -> None:
    """Compare all shapes without loading weights."""
    places, filled = shapes(Sizes()), set()
    for name, shape in golden.json("full_size_keys.json").items():
        for lead in ("", "model."):
            place = policy_target(lead + name)
            if place is None:
                assert "gemma_expert.lm_head" in name
                continue
            assert places[place] == tuple(shape), name
            filled.add(place)
    assert filled == set(places)


def test_the_full_size_model_has_the_published_number_of_parameters() -> None:
    count = sum(torch.Size(shape).numel() for shape in shapes(Sizes()).values())
    assert count + 257152 * 1024 == 3_616_757_520
