"""NVTX ranges around the steps of a worker, for Nsight Systems (`up --enable-nvtx`). Chosen by the worker's main."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

Ranges = Callable[[str, str], AbstractContextManager[object]]
"""What is done (launch, collect) and of which node -> a block around it."""

_NOTHING: Final = nullcontext()


def no_range(what: str, node: str) -> AbstractContextManager[object]:
    """No mark. One object for all steps: they are too many for one each."""
    return _NOTHING


def ranges_on(device: str, *, is_wanted: bool) -> Ranges:
    """Marks for the steps on a device, `cpu` or `cuda:INDEX`. On a CPU there are none: `up` has said so."""
    if not is_wanted or not device.startswith("cuda"):
        return no_range
    import torch

    def marked(what: str, node: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(f"{what} {node}")

    return marked
