"""The device of a rank: what its name means, how results come back from it, and whether it computes at all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from mstar_core.errors import ConfigError, StartError

if TYPE_CHECKING:
    pass

_NAME = re.compile(r"^(cpu|cuda(:\d+)?)$")


def resolve_device(name: str) -> torch.device:
    """Turn `cpu`, `cuda` or `cuda:i` into a device that exists here.

    Raises ConfigError for another name and StartError for a GPU that is not there.
    """
    if not _NAME.match(name):
        raise ConfigError(f"{name!r} is not a device", hint="write cpu, cuda or cuda:0", key="device")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise StartError(
            f"there is no device cuda:{index}", f"torch {torch.__version__} sees {count} GPUs", phase="plan"
        )
    return torch.device("cuda", index)


def prepare_device(device: torch.device) -> None:
    """Bind this process to its device: one torch thread, and the current device on a GPU."""
    # Worker processes outnumber cores; spinning threads of one starve the others, and its own.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Convolutions in float32 round to ten bits otherwise: a vocoder's samples were off by 4e-3.
        torch.backends.cudnn.allow_tf32 = False


def check_device(device: torch.device) -> None:
    """Compute something known on the device. Raises StartError when the answer is wrong or does not come."""
    try:
        left = torch.arange(64, dtype=torch.float32, device=device).view(8, 8)
        trace = float((left @ torch.eye(8, device=device)).diagonal().sum().cpu())
    except RuntimeError as error:
        raise StartError(f"{device} does not compute", str(error).splitlines()[0], phase="plan") from error
    if trace != 252.0:
        raise StartError(f"{device} computes wrong results", f"a trace of 252 came out as {trace}", phase="plan")
