"""Every kernel of the vocoder at small and odd sizes, for `make sanitize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.engine.device import prepare_device
from mstar_core.plugin.model import ModelContext
from mstar_orpheus.checkpoint.config import NOISE_MODES
from mstar_orpheus.model import Orpheus
from tests.gpu.kernels import launched

pytestmark = pytest.mark.gpu


def test_kernels_are_all_run_here(reference: Any) -> None:
    """This test must launch every kernel, because `make sanitize` checks only what runs here."""
    device = torch.device("cuda", 0)
    prepare_device(device)
    context = ModelContext(spec=reference.spec, folder=reference.folder, device=device, dtype=torch.float32)
    vocoder: Any = Orpheus(context).get_submodule(reference.spec.node("snac_decoder"))
    size = vocoder.snac.config.codebook_size
    for frames, rows in ((4, 1), (4, 3), (4, 9)):
        slots = torch.arange(7 * frames) % 7 * size
        window = vocoder.audio_offset + slots + torch.randint(0, size, (rows, 7 * frames))
        inputs = {"step": torch.arange(rows), "seed": torch.arange(rows), "first": torch.arange(rows) == 0}
        inputs["noise"] = torch.full((rows,), NOISE_MODES.index("seeded"))
        inputs["last"] = inputs["first"]
        for flush in (torch.zeros(rows, dtype=torch.bool), torch.ones(rows, dtype=torch.bool)):
            pcm = vocoder(window=window, flush=flush, **inputs)["pcm"]
            assert all(len(row) and row.abs().max() > 0 for row in pcm)
    torch.cuda.synchronize()
    actual = launched("mstar_orpheus")
    assert actual and all(actual.values()), {name for name, has_run in actual.items() if not has_run}
