"""Capacity checks of a plan's GPUs: locks of other deployments, free memory, size of weights. Used by the planner."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mstar_core.config.deployment import Plan
from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import gpu_holder, taken_error
from mstar_core.host.hardware.gpus import Gpu, GpuProcess, visible_gpus
from mstar_core.host.hardware.memory import MEMINFO, memory_facts
from mstar_core.weights.files import read_header
from mstarctl.output import size_text
from mstarctl.output.units import counted

ELEMENT_BYTES: Final = 2
"""Most bytes per weight that are counted: less if its size on disk is smaller."""

_DISK_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
LISTED_BYTES: Final = 256 << 20
"""Processes with less GPU memory than this are not listed."""


def check_free(keys: Mapping[str, str]) -> None:
    """Raise StartError if another deployment has locked one of the GPUs."""
    for device, key in keys.items():
        holder = gpu_holder(key)
        if holder is not None:
            raise taken_error(device, holder)


def check_memory(
    name: str,
    plan: Plan,
    keys: Mapping[str, str],
    gpus: Sequence[Gpu],
    needed: int,
    processes: Callable[[], Iterable[GpuProcess]],
) -> None:
    """Raise StartError if the weights alone exceed the free memory of the plan's GPUs together.

    keys: lock key by device. needed: least bytes of the weights; 0 if unknown. processes: called for the error alone,
    because nvidia-smi takes a second.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid}
    mine = [by_uuid[key] for key in keys.values() if key in by_uuid]
    if not needed or len(mine) != len(keys):
        return
    free = sum(gpu.free for gpu in mine)
    if needed <= free:
        return
    total = sum(gpu.total for gpu in mine)
    nodes = ", ".join(dict.fromkeys(node for rank in plan.ranks for node in rank.nodes))
    lines = [f"{nodes}: weights need {size_text(needed)}; {size_text(free)} of {size_text(total)} are free"]
    uuids = {gpu.uuid for gpu in mine}
    held = sorted((p for p in processes() if p.uuid in uuids and p.used >= LISTED_BYTES), key=lambda p: -p.used)
    lines += [f"   {size_text(p.used)} are used by pid {p.pid}{_command(p.pid)}" for p in held]
    more = [str(index) for index, gpu in enumerate(visible_gpus(gpus)) if gpu.uuid not in uuids]
    hint = "end the processes that use the memory" if held else "use a GPU with more memory"
    if more:
        hint += f", or use other GPUs: --gpus {','.join(more)}"
    raise StartError(
        f"{name} does not fit on {counted(len(mine), 'GPU')}", "\n".join(lines), hint, phase="plan", code="gpu_memory"
    )


def free_bytes(keys: Mapping[str, str], gpus: Sequence[Gpu], meminfo: Path = MEMINFO) -> int:
    """Return the free memory of a plan's GPUs together, or of the host on the CPU; 0 if it is unknown.

    keys: lock key by device, empty on the CPU.
    """
    if keys:
        by_uuid = {gpu.uuid: gpu.free for gpu in gpus if gpu.uuid}
        return sum(by_uuid.get(key, 0) for key in set(keys.values()))
    return memory_facts(meminfo).get("MemAvailable", 0)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").split()
        import pwd

        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return ""
    return f" ({' '.join(words)[:60]}, user {user})"


def weights_bytes(folder: Path | None) -> int:
    """Return the bytes that the safetensors files of a directory need in half precision. Reads only their headers."""
    if folder is None or not folder.is_dir():
        return 0
    return sum(_file_bytes(path) for path in folder.rglob("*.safetensors"))


def _file_bytes(path: Path) -> int:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return sum(_tensor_bytes(facts) for facts in read_header(path)[1].values())
    return 0  # the process that reads the weights reports a damaged file


def _tensor_bytes(facts: Mapping[str, object]) -> int:
    count = 1
    shape = facts["shape"]
    for side in shape if isinstance(shape, list) else ():
        count *= int(side)
    return count * min(ELEMENT_BYTES, _DISK_BYTES.get(str(facts["dtype"]), 1))
