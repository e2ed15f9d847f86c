"""Random weights made on the device, for speed measurements of models that are too large to write to a disk.

A folder with `random_weights.json` beside its config files counts as a checkpoint whose tensors are all present.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import WeightsError
from mstar_core.weights.files import SEED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from mstar_core.plugin.model import DeferredReads

MARKER: Final = SEED
"""File with `{"seed": int}` in place of the weight files."""


def random_seed(folder: Path) -> int | None:
    """Return the seed of a folder with random weights, None for any other. Raises WeightsError for a bad marker."""
    path = folder / MARKER
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} must hold a seed", repr(error), 'write {"seed": 1}, or remove the file', file=str(path)
        ) from error


@torch.no_grad()
def fill_randomly(module: nn.Module, seed: int, deferred: DeferredReads | None = None) -> None:
    """Fill parameters and persistent buffers so that activations keep their scale. Same seed, same values per device.

    Matrices are normal with a deviation of 1 / sqrt(inputs), norm weights 1 and other vectors 0. deferred: takes the
    tensors that are filled when they are on their device; their values then depend on its order too.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def fill(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            if target.device not in generators:
                generators[target.device] = torch.Generator(target.device).manual_seed(seed)
            _fill(name, target, generators[target.device])

    targets = module.state_dict(keep_vars=True)
    fill(targets if deferred is None else deferred.add(module, targets, fill))


def _fill(name: str, target: Tensor, generator: torch.Generator) -> None:
    if not target.is_floating_point():
        target.zero_()
    elif target.dim() >= 2:
        inputs = math.prod(target.shape[1:]) if target.dim() != 3 or "conv" in name else target.shape[-1]
        target.normal_(0.0, 1.0 / math.sqrt(inputs), generator=generator)
    else:
        target.fill_(1.0 if name.endswith("weight") else 0.0)
