"""Slot updates and rotary angles by one kernel each equal plain operations."""

from __future__ import annotations

import copy

import pytest
import torch

from mstar_core.engine.device_state.slots import DeviceSlots
from mstar_core.layers import Rotary, RotarySpec

pytestmark = pytest.mark.gpu


def random_slots(device: torch.device, count: int, vocab: int, width: int, seed: int) -> DeviceSlots:
    """Slots of which some have stopped, some have no id yet, and some could stop by what they draw."""
    torch.manual_seed(seed)
    slots = DeviceSlots(count, vocab, device)
    slots.last.copy_(torch.randint(-1, vocab, (count + 1,)))
    slots.stopped.copy_(torch.rand(count + 1) < 0.3)
    slots.seen.copy_(torch.rand(count + 1, vocab) < 0.1)
    stops = torch.randint(0, vocab, (count + 1, width))
    slots.stop_ids = stops.masked_fill_(torch.rand(count + 1, width) < 0.5, -1).to(device)
    return slots


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 7, 8), (8, 40, 8), (33, 157, 13), (256, 1001, 16)])
def test_the_end_of_a_step_equals_plain_operations(
    cuda: torch.device, rows: int, vocab: int, width: int, sees: bool
) -> None:
    for seed in range(20):
        slots = random_slots(cuda, rows + 3, vocab, width, seed)
        plain = copy.deepcopy(slots)
        chosen = torch.randperm(rows + 3, device=cuda)[:rows]
        # Padding shares the spare slot, whose content is not defined.
        spare = rows // 4
        chosen[rows - spare :] = slots.spare
        ids = torch.randint(-1, vocab, (rows,), device=cuda)
        assert torch.equal(slots.next_ids(chosen), plain.last.index_select(0, chosen).clamp(min=0))
        found = slots.commit_ids(chosen, ids, sees=sees)
        expected = plain.commit_ids_plainly(chosen, ids, sees=sees)
        assert torch.equal(found[: rows - spare], expected[: rows - spare])
        for name in ("last", "stopped", "seen", "stop_ids"):
            assert torch.equal(getattr(slots, name)[:-1], getattr(plain, name)[:-1]), name


@pytest.mark.parametrize(("width", "tokens"), [(128, 1), (128, 70), (12, 5), (64, 300)])
def test_angles_in_one_kernel_equal_plain_operations(cuda: torch.device, width: int, tokens: int) -> None:
    rotary = Rotary(RotarySpec(width=width, base=500_000.0))
    positions = torch.randint(0, 130_000, (tokens,))
    for found, expected in zip(rotary.to(cuda)(positions.to(cuda)), rotary.cpu()(positions), strict=True):
        assert found.shape == expected.shape == (tokens, 1, width)
        assert (found.cpu() - expected).abs().max() < 2e-7
