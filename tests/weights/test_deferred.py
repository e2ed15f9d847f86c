"""Weights that are read when their layer is moved: equal to those read at once, and never all of them in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.weights.building import building
from mstar_core.weights.deferred import DeferredWeights
from mstar_core.weights.random_fill import MARKER

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Two layers, one with a fused parameter, a head that is tied to the embedding, and a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), Fused()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        both = self.layers[1].both
        return {"layers.1.both": {"layers.1.up": both[:3], "layers.1.down": both[3:]}}


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.empty(6, 4))


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (7, 4),
        "layers.0.weight": (4, 4),
        "layers.0.bias": (4,),
        "layers.1.up": (3, 4),
        "layers.1.down": (3, 4),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


NAMES = NameMap(optional=frozenset({"head.weight", "scale"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "model.safetensors")
    return tmp_path


def loaded(folder: Path, deferred: DeferredWeights | None) -> Layers:
    with building(CPU, torch.bfloat16, deferred):
        module = Layers()
    load_weights(module, Checkpoint.find(folder), NAMES, parts=module.parts(), deferred=deferred)
    return module.requires_grad_(False)


def test_layers_that_are_moved_one_by_one_equal_a_module_that_is_loaded_at_once(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    deferred = DeferredWeights(lambda done, total: told.append((done, total)))
    module = loaded(folder, deferred)
    for layer in module.layers:
        deferred.place(layer, CPU)
    assert deferred, "the embedding waits still"
    deferred.place(module, CPU)
    assert not deferred
    expected = loaded(folder, None).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    assert module.head.weight is module.embed.weight
    assert module.scale.tolist() == [3.0, 3.0] and module.angles.tolist() == [0.0, 1.0, 2.0]
    assert [done for done, _ in told] == [40, 88, 144] and {total for _, total in told} == {144}


def test_a_layer_is_read_when_it_is_moved_and_not_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[set[str]] = []
    tensors = Checkpoint.tensors

    def noted(checkpoint: Checkpoint, names: Mapping[str, Tensor], *rest: object) -> object:
        reads.append(set(names))
        return tensors(checkpoint, names, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(Checkpoint, "tensors", noted)
    deferred = DeferredWeights()
    module = loaded(folder, deferred)
    assert reads == []
    deferred.place(module.layers[1], CPU)
    assert reads == [{"layers.1.up", "layers.1.down"}]


def test_names_are_checked_before_anything_is_read_and_shapes_with_their_layer(folder: Path) -> None:
    values = state()
    save_file({**values, "other": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="contains other"):
        loaded(folder, DeferredWeights())
    save_file({**values, "layers.0.bias": torch.zeros(5)}, folder / "model.safetensors")
    deferred = DeferredWeights()
    module = loaded(folder, deferred)
    deferred.place(module.layers[1], CPU)
    with pytest.raises(WeightsError, match=r"layers\.0\.bias has shape \[5\]"):
        deferred.place(module.layers[0], CPU)


def test_files_that_are_no_safetensors_are_read_at_once(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(state(), folder / "pytorch_model.bin")
    deferred = DeferredWeights()
    module = loaded(folder, deferred)
    assert not deferred and torch.equal(module.layers[0].bias, state()["layers.0.bias"].bfloat16())


def test_random_weights_are_made_with_their_layer(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(json.dumps({"seed": 1}))
    made = []
    for _ in range(2):
        deferred = DeferredWeights()
        module = loaded(tmp_path, deferred)
        deferred.place(module.layers[0], CPU)
        assert deferred
        deferred.place(module, CPU)
        assert not deferred and float(module.layers[1].both.float().std()) > 0
        made.append(module.state_dict())
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
