"""Pi0.5 on CUDA against its references and against itself: float32 and bfloat16, plainly and by graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.families.policy import Acting, Place, observation, random_modules
from mstar_core.engine.device import prepare_device
from mstar_pi05.sizes import Sizes, Tower, Vision
from tests.engine.golden_engines import BFLOAT16, FLOAT32, check_policy, difference, policy

pytestmark = pytest.mark.gpu

WIDE = Sizes(
    vocab=1000,
    vision=Vision(width=256, layers=3, heads=4, mlp=512, image_size=224, patch_size=14),
    language=Tower(width=512, layers=4, mlp=1024, heads=8, kv_heads=1, head_dim=256),
    expert=Tower(width=256, layers=4, mlp=512, heads=8, kv_heads=1, head_dim=256),
)  # fmt: skip
"""The released head size, places of a camera and horizon, in few and narrow blocks."""


def place(cuda: torch.device, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Place:
    prepare_device(cuda)
    vision = "bfloat16" if dtype == torch.bfloat16 else "float32"
    made = Place(device=cuda, dtype=dtype, vision=vision, max_tokens=1024, requests=16)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_float32_equals_the_reference(cuda: torch.device, tmp_path: Path) -> None:
    acting = policy(place(cuda, torch.float32, max_tokens=128), tmp_path)
    check_policy(acting, FLOAT32)
    assert acting.counters()["LLM"]["graph_hits"] >= 3


@pytest.mark.parametrize("vision", ["bfloat16", "tf32", "float32"])
def test_bfloat16_is_near_the_reference(vision: str, cuda: torch.device, tmp_path: Path) -> None:
    """The golden head size, 16, is none that FlashInfer has: torch attends."""
    check_policy(policy(place(cuda, max_tokens=128, vision=vision), tmp_path), BFLOAT16)


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_captured_equals_plain(attention: str, cuda: torch.device) -> None:
    """In bfloat16 at the released head size: what differs is the order of sums."""
    here = place(cuda, attention=attention)
    modules = random_modules(WIDE, here)
    plain = Acting(WIDE, modules, replace(here, is_captured=False))
    captured = Acting(WIDE, modules, here)
    for group in ([3], [1, 2, 3], [3] * 9):
        seen = [observation(WIDE, cameras, 40 + 7 * n, seed=n) for n, cameras in enumerate(group)]
        expected = plain.act(*seen)
        captured.act(*seen)
        captured.turner.capture()
        before = captured.counters()["LLM"]["graph_hits"]
        for found, wanted in zip(captured.act(*seen), expected, strict=True):
            assert difference(found, wanted, is_relative=True) < BFLOAT16.actions
        assert captured.counters()["LLM"]["graph_hits"] > before


def test_replays_of_the_same_requests_give_the_same_bits(cuda: torch.device) -> None:
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    seen = [observation(WIDE, 3, 50, seed=n) for n in range(4)]
    acting.act(*seen)
    acting.turner.capture()
    first, second = acting.act(*seen), acting.act(*seen)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_held_after_many_requests(cuda: torch.device) -> None:
    here = place(cuda)
    acting = Acting(WIDE, random_modules(WIDE, here), here)
    for number in range(30):
        acting.act(*[observation(WIDE, 1 + (number + n) % 3, 20 + n, seed=n) for n in range(1 + number % 5)])
        acting.turner.capture()
    memory = acting.turner.runners["LLM"].memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0)
