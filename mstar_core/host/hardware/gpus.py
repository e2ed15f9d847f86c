"""GPUs of this host, read from the driver's library or from nvidia-smi, without torch.

Used by `up`, `doctor` and the survey of a cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SMI_TIMEOUT_S: Final = 15.0
_QUERY: Final = "name,driver_version,memory.free,memory.total,uuid"
_PROCESSES: Final = "gpu_uuid,pid,used_memory"
_CSV: Final = "--format=csv,noheader,nounits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU and its current memory. free, total: bytes. uuid: "" if nvidia-smi is too old to report it."""

    name: str
    driver: str
    free: int
    total: int
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that has GPU memory, as the driver reports it. used: bytes."""

    uuid: str
    pid: int
    used: int


def gpus() -> list[Gpu]:
    """Return the GPUs of the driver, through nvidia-ml-py if it is installed, else through nvidia-smi."""
    devices = _by_library()
    return _by_tool() if devices is None else devices


def _by_library() -> list[Gpu] | None:
    if find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None  # no driver, or one of another version: nvidia-smi reports it
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = _text(nvml.nvmlDeviceGetName(handle))
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            devices.append(Gpu(name=name, driver=driver, free=int(memory.free), total=int(memory.total), uuid=uuid))
        return devices
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _by_tool() -> list[Gpu]:
    return parse_smi(_run_smi(f"--query-gpu={_QUERY}", _CSV))


def gpu_processes() -> list[GpuProcess]:
    """Return the processes that have memory on the GPUs of this host, as far as nvidia-smi can see them."""
    return parse_processes(_run_smi(f"--query-compute-apps={_PROCESSES}", _CSV))


def _run_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_smi(text: str) -> list[Gpu]:
    """Parse `nvidia-smi --query-gpu=name,driver_version,memory.free,memory.total,uuid`, memory in MiB."""
    devices = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        with suppress(ValueError, IndexError):
            free, total = int(fields[2]) << 20, int(fields[3]) << 20
            uuid = fields[4] if len(fields) > 4 else ""
            devices.append(Gpu(name=fields[0], driver=fields[1], free=free, total=total, uuid=uuid))
    return devices


def parse_processes(text: str) -> list[GpuProcess]:
    """Parse `nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory`, memory in MiB; other lines are skipped."""
    users = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        with suppress(ValueError, IndexError):
            users.append(GpuProcess(uuid=fields[0], pid=int(fields[1]), used=int(fields[2]) << 20))
    return users


def gpu_keys(devices: Iterable[str], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the lock key of each GPU device: its uuid, or its number if the driver reports none."""
    keys = {}
    visible = visible_gpus(gpus)
    for device in dict.fromkeys(devices):
        kind, _, number = device.partition(":")
        if kind == "cuda":
            index = int(number or 0)
            known = visible[index] if index < len(visible) else None
            keys[device] = (known.uuid if known is not None else "") or f"nvidia{index}"
    return keys


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, in its order. The uuid of a MIG device is its name."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    visible = []
    for word in (part.strip() for part in listed.split(",")):
        if word.isdigit() and int(word) < len(gpus):
            visible.append(gpus[int(word)])
        elif word.startswith("MIG-"):
            visible.append(Gpu(name="MIG device", driver="", free=0, total=0, uuid=word))
        else:
            named = next((gpu for gpu in gpus if word and gpu.uuid.startswith(word)), None)
            if named is None:
                break  # CUDA stops at the first unknown word
            visible.append(named)
    return visible


def count_gpus() -> int:
    """Return the number of GPUs that processes started here will see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(gpu_names())
    if visible is None:
        return present
    listed = [part for part in visible.split(",") if part.strip()]
    until_bad = next((i for i, part in enumerate(listed) if part.strip() == "-1"), len(listed))
    return min(until_bad, present)


def gpu_names() -> list[str]:
    """Return a line for each GPU of this host; without the driver's tool its device file."""
    listed = _run_smi("-L")
    if listed:
        return [line.strip() for line in listed.splitlines() if line.startswith("GPU ")]
    return sorted(path.name for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
