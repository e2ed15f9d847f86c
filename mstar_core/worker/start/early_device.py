"""Opening of a rank's GPU on a thread, while the worker imports PyTorch. Called first by the worker's process.

The driver takes half a second to make a context, without the interpreter. PyTorch finds the same context, the
device's primary one, and reports what is wrong with a device that does not open. Imports no torch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mstar_core.config.deployment import DeploymentSpec

DRIVER: Final = "libcuda.so.1"


def open_early(argv: Sequence[str]) -> threading.Thread | None:
    """Begin to open the GPU of a worker's rank. Returns None if it has none. argv: the worker's arguments."""
    index = gpu_of(argv)
    if index is None:
        return None
    thread = threading.Thread(target=open_context, args=(index,), name="device", daemon=True)
    thread.start()
    return thread


def gpu_of(argv: Sequence[str]) -> int | None:
    """Return the index of the GPU of `SPEC … --rank R`, None for a rank on a CPU or arguments that do not parse."""
    with suppress(Exception):  # the worker reads them again, where an error is raised
        rank = int(argv[argv.index("--rank") + 1])
        plan = next(each for each in DeploymentSpec.load(Path(argv[0])).plan.ranks if each.rank == rank)
        kind, _, index = plan.device.partition(":")
        return int(index or 0) if kind == "cuda" else None
    return None


def open_context(index: int, library: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Make the primary context of a GPU. Returns whether the driver has made it."""
    with suppress(OSError, AttributeError):  # without a driver PyTorch reports the device
        driver = library(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        return not (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )
    return False
