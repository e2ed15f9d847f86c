"""Imports of a standby process: everything that a worker or a follower imports until it is ready.

Called by name from the standby process. It opens no device and no socket.
"""

from __future__ import annotations

import importlib
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import StartError
from mstar_core.plugin.loader import bound_model
from mstar_core.targets import load_target

if TYPE_CHECKING:
    from mstar_core.config.deployment import DeploymentSpec

log = logging.getLogger(__name__)

WORKER: Final = "mstar_core.worker.main"
"""Module that imports what workers and followers share."""


def preload(spec: DeploymentSpec) -> None:
    """Import the worker, the code of the model's nodes and, for GPU ranks, Triton and FlashInfer.

    Raises StartError if an import has opened a GPU: the process would hold its memory beside the workers.
    """
    started = time.monotonic()
    importlib.import_module(WORKER)
    model = bound_model(spec.plugin, spec.model, spec.folder, spec.model_kwargs)
    if model.model is not None:
        load_target(model.model)
    if any(rank.device != "cpu" for rank in spec.plan.ranks):
        from mstar_core.worker.start.build import PRELOADED

        for name in PRELOADED:
            with suppress(ImportError):  # the worker that needs it raises an error that names the package
                importlib.import_module(name)
        check_no_device()
    log.info("imports took %.2f s", time.monotonic() - started)


def check_no_device() -> None:
    """Raise StartError if this process has a context on a GPU."""
    if not torch.cuda.is_initialized():
        return
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined] # builds without CUDA lack it
    opened = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    if opened:
        raise StartError(
            f"importing the modules of a worker has opened GPU {opened[0]}",
            "a standby process must hold no device memory",
            "switch it off with standby: false, or report the module that uses the GPU when it is imported",
            phase="import",
        )
