"""Typical mistakes in the thinker change its golden outputs by more than the tolerance (specification section 17)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mstar_core.layers import Rotary, moe, rotary, transformer
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.thinker.thinker import Thinker, rotary_spec

from .thinker_cases import FOLDER, STATES, Case, DenseCache, golden_thinker, needs_weights, prefill, read

pytestmark = needs_weights
Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch, Thinker], None]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def accepts_one_layer_late(patch: Patch, thinker: Thinker) -> None:
    """Pitfall 2."""
    thinker.accept_layer += 1


def axes_in_blocks(patch: Patch, thinker: Thinker) -> None:
    """Pitfall 3: M-RoPE in three contiguous blocks."""
    spec = rotary_spec(read_config(FOLDER).thinker)
    axes = torch.arange(3).repeat_interleave(rotary.section_axes(spec.sections).bincount())
    thinker.model.rotary = Rotary(spec)
    thinker.model.rotary.axes = axes


def norms_after_rotation(patch: Patch, thinker: Thinker) -> None:
    """Pitfall 3: heads are normalized after RoPE."""

    def branch(self: transformer.Attention, x: Tensor, kv: DenseCache, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            layer(x).view(len(x), -1, self.spec.head_dim) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotary.rotate(query, *rotation), rotary.rotate(key, *rotation)
        mixed = kv.attend(self.layer, self.q_norm(query), self.k_norm(key), value)
        out: Tensor = self.o_proj(mixed.reshape(len(x), -1))
        return out

    patch.setattr(transformer.Attention, "branch", branch)


def weights_not_divided(patch: Patch, thinker: Thinker) -> None:
    """Pitfall 5: the weights of the chosen experts keep their shares of all experts."""

    def route(self: moe.SparseMoE, x: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.softmax(self.gate(x), dim=-1).topk(self.spec.experts_per_token, dim=-1)
        return found

    patch.setattr(moe.SparseMoE, "route", route)


def one_expert_fewer(patch: Patch, thinker: Thinker) -> None:
    """Pitfall 5: another number of experts per token."""
    true = moe.SparseMoE.route

    def route(self: moe.SparseMoE, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = true(self, x)
        weights = weights[:, :-1]
        return weights / weights.sum(dim=-1, keepdim=True), chosen[:, :-1]

    patch.setattr(moe.SparseMoE, "route", route)


def gate_and_up_exchanged(patch: Patch, thinker: Thinker) -> None:
    """Section 2: gate rows come first in the fused experts."""
    for block in thinker.model.layers:
        block.mlp.experts.gate_up_proj.data = block.mlp.experts.gate_up_proj.data.roll(block.mlp.spec.inner, dims=1)


def maps_one_layer_late(patch: Patch, thinker: Thinker) -> None:
    """Section 6: the maps are added to the outputs of layers 0, 1, 2."""
    true = thinker.model.forward

    def forward(x: Tensor, positions: Tensor, kv: DenseCache, maps: Tensor, accept: int) -> tuple[Tensor, Tensor]:
        return true(x, positions, kv, torch.cat([torch.zeros_like(maps[:1]), maps]), accept)

    patch.setattr(thinker.model, "forward", forward)


EVERYWHERE: tuple[Mistake, ...] = (norms_after_rotation, weights_not_divided, one_expert_fewer, gate_and_up_exchanged)


def distance(thinker: Thinker, case: Case) -> float:
    found, expected = prefill(thinker, case, DenseCache(), []), case.tensors
    hidden = (found["hidden"] - expected["thinker_last_hidden"]).abs().max()
    return max(float(hidden), float((found["states"] - expected["thinker_accept_hidden"]).abs().max()))


@pytest.mark.parametrize("mistake", EVERYWHERE, ids=lambda mistake: mistake.__name__)
def test_a_mistake_changes_text(mistake: Mistake, monkeypatch: Patch) -> None:
    thinker, case = golden_thinker(), read("text")
    assert distance(thinker, case) <= STATES
    mistake(monkeypatch, thinker)
    assert distance(thinker, case) > 10 * STATES


@pytest.mark.parametrize(
    "mistake", [accepts_one_layer_late, axes_in_blocks, maps_one_layer_late], ids=lambda mistake: mistake.__name__
)
def test_a_mistake_changes_images(mistake: Mistake, monkeypatch: Patch) -> None:
    thinker, case = golden_thinker(), read("image")
    assert distance(thinker, case) <= STATES
    mistake(monkeypatch, thinker)
    assert distance(thinker, case) > 10 * STATES
