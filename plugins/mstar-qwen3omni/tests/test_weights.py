"""Loading: experts in their fused tensors, errors that name file and tensor, and where the weights come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_core.errors import WeightsError
from mstar_core.graph import NodeSpec
from mstar_core.layers.linear import fuse_projections
from mstar_core.layers.quantize import quantize, quantize_onto
from mstar_core.parallel.shards import Shard
from mstar_core.plugin.model import ModelContext
from mstar_core.weights.deferred import DeferredWeights
from mstar_core.weights.sources import Received
from mstar_qwen3omni.model import Qwen3Omni
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.sources.download import REPO, resolve_weights
from mstar_qwen3omni.sources.tiny import write_tiny
from mstar_qwen3omni.thinker.thinker import Thinker

EXPERT = "thinker.model.layers.1.mlp.experts.5"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "qwen3_omni")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "changed"))


def context(folder: Path | None, **changes: int) -> ModelContext:
    (spec,) = mstar_models()
    return ModelContext(spec=spec, folder=folder, device=torch.device("cpu"), dtype=torch.float32, **changes)


def node(name: str) -> NodeSpec:
    (spec,) = mstar_models()
    return spec.node(name)


def thinker(folder: Path) -> Thinker:
    built = Qwen3Omni(context(folder)).get_submodule(node("Thinker"))
    assert isinstance(built, Thinker)
    return built


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of a checkpoint and write them as one file without an index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_experts_are_read_into_their_fused_tensors(tiny: Path) -> None:
    built, stored = thinker(tiny), {}
    for path in tiny.glob("*.safetensors"):
        stored |= load_file(path)
    experts = built.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj[5].chunk(2)
    for kind, actual in (("gate", gate), ("up", up), ("down", experts.down_proj[5])):
        assert torch.equal(actual, stored[f"{EXPERT}.{kind}_proj.weight"])
    assert not any(parameter.requires_grad for parameter in built.parameters())


@pytest.mark.parametrize("name", ["Thinker", "Talker"])
def test_layers_quantized_one_by_one_equal_a_node_quantized_at_once(tiny: Path, name: str) -> None:
    cpu, deferred = torch.device("cpu"), DeferredWeights()
    whole = Qwen3Omni(context(tiny)).get_submodule(node(name))
    fuse_projections(whole)
    layered = Qwen3Omni(replace(context(tiny), deferred=deferred)).get_submodule(node(name))
    assert deferred, "nothing is read yet"
    reports = quantize(whole, "fp8"), quantize_onto(cpu, layered, "fp8", place=deferred.place)
    assert reports[0] == reports[1] and not deferred
    one, two = whole.state_dict(), layered.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(value.float(), two[key].float()) for key, value in one.items())


def test_a_missing_expert_is_named(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.up_proj.weight"]

    change(folder, edit)
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        thinker(folder)


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}.down_proj.weight"] = torch.zeros(3, 4)

    change(folder, edit)
    with pytest.raises(WeightsError, match=r"experts\.5\.down_proj\.weight has shape \[3, 4\]"):
        thinker(folder)


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["thinker.model.layers.1.mlp.experts.8.up_proj.weight"] = torch.zeros(32, 64)

    change(folder, edit)
    with pytest.raises(WeightsError, match=r"experts\.8\.up_proj\.weight, which the model does not have"):
        thinker(folder)


def test_a_checkpoint_without_speech_serves_text(folder: Path) -> None:
    """Only the thinker's own tensors are needed; the talker's nodes say what is missing."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith("thinker.model")]:
            if name != "thinker.lm_head.weight":
                del tensors[name]

    change(folder, edit)
    config = json.loads((folder / "config.json").read_text())
    del config["talker_config"], config["code2wav_config"]
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    assert thinker(folder).lm_head.weight.shape[1] == 64
    with pytest.raises(WeightsError, match="has no speech"):
        Qwen3Omni(context(folder)).get_submodule(node("Talker"))
    with pytest.raises(WeightsError, match="contains no tensors of audio_encoder"):
        Qwen3Omni(context(folder)).get_submodule(node("audio_encoder"))


@pytest.mark.parametrize("name", ["Thinker", "Talker"])
def test_each_rank_of_a_group_reads_its_part_of_the_weights(tiny: Path, name: str) -> None:
    whole = Qwen3Omni(context(tiny)).get_submodule(node(name))
    ranks = [Qwen3Omni(context(tiny, shard=Shard(index=index, size=2))).get_submodule(node(name)) for index in range(2)]
    parts = [dict(rank.named_parameters()) for rank in ranks]
    sizes = {key: [tuple(part[key].shape) for part in parts] for key in parts[0]}
    for key, value in whole.named_parameters():
        if sizes[key][0] == tuple(value.shape):
            assert all(torch.equal(part[key], value) for part in parts), key
        elif key.endswith("gate_up_proj"):
            gates, ups = zip(*(part[key].chunk(2, dim=1) for part in parts), strict=True)
            assert torch.equal(torch.cat([*gates, *ups], dim=1), value), key
        else:
            dim = next(at for at, size in enumerate(value.shape) if sizes[key][0][at] != size)
            assert torch.equal(torch.cat([part[key] for part in parts], dim=dim), value), key


def test_vocabularies(tiny: Path) -> None:
    model = Qwen3Omni(context(tiny))
    assert [model.vocab_size(node(name)) for name in ("Thinker", "Talker", "Code2Wav")] == [320, 1088, 0]


# -- where the weights come from ---------------------------------------------------------------------------------------


@dataclass
class FakeHub:
    """A hub on disk. remote: the repository; cache: fetched files."""

    remote: Path
    cache: Path
    is_offline: bool = False
    fetched: list[str] = field(default_factory=list)

    def cached(self, repo: str, file: str) -> Path | None:
        path = self.cache / repo / file
        return path if path.is_file() else None

    def files(self, repo: str) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.remote.iterdir()} | {"README.md": 7}

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        target = self.cache / repo / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.remote / file, target)
        received(target.stat().st_size)
        self.fetched.append(file)
        return target


def test_a_download_takes_what_a_deployment_reads_and_is_reused(tiny: Path, tmp_path: Path) -> None:
    hub, seen = FakeHub(tiny, tmp_path / "cache"), list[tuple[int, int, str]]()
    actual = resolve_weights(progress=lambda *report: seen.append(report), hub=hub)
    assert actual == tmp_path / "cache" / REPO and seen[-1][0] == seen[-1][1]
    assert {"config.json", "vocab.json", "merges.txt", "model-00002-of-00002.safetensors"} <= set(hub.fetched)
    assert "README.md" not in hub.fetched
    before = len(hub.fetched)
    assert resolve_weights(hub=hub) == actual and len(hub.fetched) == before


def test_without_network_the_error_tells_what_to_do(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="are not on this machine") as caught:
        resolve_weights(hub=FakeHub(tiny, tmp_path / "cache", is_offline=True))
    assert "qwen3_omni:tiny" in caught.value.hint


def test_a_truncated_file_of_the_operator_is_named(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match=r"model-00001-of-00002\.safetensors is damaged"):
        resolve_weights(folder)
    assert resolve_weights(write_tiny(folder.parent / "whole")).name == "whole"
