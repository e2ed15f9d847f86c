"""Checkpoint reader: every layout, and every kind of invalid checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3, bias=False)


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (5, 3), "up.bias": (5,), "down.weight": (3, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, layout: str) -> Path:
    values = state()
    match layout:
        case "single":
            save_file(values, folder / "model.safetensors")
        case "torch":
            torch.save(values, folder / "pytorch_model.bin")
        case "sharded":
            files = {"up.weight": "model-00001-of-00002.safetensors", "up.bias": "model-00001-of-00002.safetensors"}
            files["down.weight"] = "model-00002-of-00002.safetensors"
            for file in set(files.values()):
                save_file({name: values[name] for name in values if files[name] == file}, folder / file)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("layout", ["single", "sharded", "torch"])
def test_every_layout_loads_and_casts(tmp_path: Path, layout: str) -> None:
    module = Small().to(torch.bfloat16)
    seen: list[tuple[int, int, str]] = []
    load_weights(module, Checkpoint.find(write(tmp_path, layout)), progress=lambda *report: seen.append(report))
    for name, value in state().items():
        assert torch.equal(module.state_dict()[name], value.to(torch.bfloat16))
    assert seen[-1][0] == seen[-1][1] > 0 and [report[0] for report in seen] == sorted(report[0] for report in seen)


def test_names_are_mapped_and_skipped(tmp_path: Path) -> None:
    values = {f"model.{name}": value for name, value in state().items()}
    save_file({**values, "extra.thing": torch.zeros(1)}, tmp_path / "model.safetensors")
    module = Small()
    load_weights(module, Checkpoint.find(tmp_path), NameMap(prefixes={"model.": ""}, ignore=("extra.",)))
    assert torch.equal(module.up.weight, state()["up.weight"])


def change(tmp_path: Path, **changes: torch.Tensor | None) -> Checkpoint:
    values = {**state(), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in values.items() if value is not None}, tmp_path / "model.safetensors")
    return Checkpoint.find(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="lacks up.bias"):
        load_weights(Small(), change(tmp_path, up__bias=None))


def test_an_unexpected_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model.safetensors contains up.scale"):
        load_weights(Small(), change(tmp_path, up__scale=torch.zeros(2)))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"up.bias has shape \[4\]") as caught:
        load_weights(Small(), change(tmp_path, up__bias=torch.zeros(4)))
    assert "[5]" in caught.value.detail


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, "single") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(WeightsError, match="model.safetensors") as caught:
        load_weights(Small(), Checkpoint.find(tmp_path))
    assert caught.value.facts["file"] == str(path)


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 broken"])
def test_a_damaged_torch_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(WeightsError, match="pytorch_model.bin"):
        Checkpoint.find(tmp_path)


def test_a_torch_file_must_contain_only_tensors(tmp_path: Path) -> None:
    torch.save({"weights": [1, 2]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="does not contain only tensors"):
        Checkpoint.find(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write(tmp_path, "sharded") / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00002.safetensors is missing"):
        Checkpoint.find(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../secret.safetensors"}}'])
def test_a_wrong_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="index"):
        Checkpoint.find(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    index = write(tmp_path, "sharded") / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "gone": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match="lacks gone"):
        Checkpoint.find(tmp_path)


def test_an_empty_or_missing_folder_is_an_error_with_the_names_tried(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        Checkpoint.find(tmp_path)
    assert "model.safetensors" in caught.value.detail
    with pytest.raises(WeightsError, match="no such folder"):
        Checkpoint.find(tmp_path / "nowhere")


def test_a_folder_with_a_seed_has_random_weights_of_every_shape(tmp_path: Path) -> None:
    (tmp_path / "random_weights.json").write_text('{"seed": 3}')
    actual = [nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256)) for _ in range(2)]
    for module in actual:
        load_weights(module, Checkpoint.find(tmp_path))
    assert torch.equal(actual[0][0].weight, actual[1][0].weight)
    assert float(actual[0][0].weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(actual[0][1].weight, torch.ones(256)) and not actual[0][0].bias.any()


def test_a_bad_seed_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "random_weights.json").write_text("{}")
    with pytest.raises(WeightsError, match="random_weights.json must hold a seed"):
        Checkpoint.find(tmp_path)
