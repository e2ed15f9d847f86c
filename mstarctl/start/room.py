"""Whether the GPUs of a plan are free: locks of other deployments, memory that others hold. Asked by plan.py."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mstar_core.config.deployment import Plan
from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import gpu_holder, taken_error
from mstarctl.output import size_text
from mstarctl.start.accelerator import Gpu, GpuProcess

ELEMENT_BYTES: Final = {"fp8": 1}
"""Least bytes of a weight by quantization; else two, or what it has on disk when that is less."""

_DISK_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
HEADER_LIMIT: Final = 100 << 20
CONCURRENCY: Final = ((120 << 30, 128), (75 << 30, 64))
"""Bytes of a GPU -> requests at once, measured with Orpheus in real time (docs/performance.md)."""

FEW_REQUESTS: Final = 32
LITTLE: Final = 256 << 20
"""Memory of another process below this is not worth a line."""


def gpu_keys(devices: Iterable[str], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Device -> key of its lock: the GPU's uuid, or its number where the driver does not tell. None for the CPU."""
    keys = {}
    visible = visible_gpus(gpus)
    for device in dict.fromkeys(devices):
        kind, _, number = device.partition(":")
        if kind == "cuda":
            index = int(number or 0)
            known = visible[index] if index < len(visible) else None
            keys[device] = (known.uuid if known is not None else "") or f"nvidia{index}"
    return keys


def visible_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; a MIG device has its own name as uuid."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    made = []
    for word in (part.strip() for part in listed.split(",")):
        if word.isdigit() and int(word) < len(gpus):
            made.append(gpus[int(word)])
        elif word.startswith("MIG-"):
            made.append(Gpu(name="MIG device", driver="", free=0, total=0, uuid=word))
        else:
            named = next((gpu for gpu in gpus if word and gpu.uuid.startswith(word)), None)
            if named is None:
                break  # CUDA stops at the first word that names nothing
            made.append(named)
    return made


def check_free(keys: Mapping[str, str]) -> None:
    """Raises StartError when another deployment holds one of the GPUs."""
    for device, key in keys.items():
        holder = gpu_holder(key)
        if holder is not None:
            raise taken_error(device, holder)


def check_memory(
    name: str, plan: Plan, keys: Mapping[str, str], gpus: Sequence[Gpu], needed: int, processes: Iterable[GpuProcess]
) -> None:
    """Raises StartError when the weights alone are more than the plan's GPUs have free together. needed: bytes, at
    least; 0 when it is not known.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid}
    mine = [by_uuid[key] for key in keys.values() if key in by_uuid]
    if not needed or len(mine) != len(keys):
        return
    free = sum(gpu.free for gpu in mine)
    if needed <= free:
        return
    count = f"{len(mine)} GPU" + ("" if len(mine) == 1 else "s")
    total = sum(gpu.total for gpu in mine)
    nodes = ", ".join(dict.fromkeys(node for rank in plan.ranks for node in rank.nodes))
    lines = [f"{nodes}: weights need {size_text(needed)}; {size_text(free)} of {size_text(total)} are free"]
    uuids = {gpu.uuid for gpu in mine}
    held = sorted((p for p in processes if p.uuid in uuids and p.used >= LITTLE), key=lambda p: -p.used)
    lines += [f"   {size_text(p.used)} are held by pid {p.pid}{_command(p.pid)}" for p in held]
    more = [str(index) for index, gpu in enumerate(visible_gpus(gpus)) if gpu.uuid not in uuids]
    hint = "end what holds the memory" if held else "take a GPU with more memory"
    if more:
        hint += f", or others: --gpus {','.join(more)}"
    raise StartError(f"{name} does not fit on {count}", "\n".join(lines), hint, phase="plan", code="gpu_memory")


def free_bytes(keys: Mapping[str, str], gpus: Sequence[Gpu], meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the devices of a plan have free together: its GPUs, or the host when it has none; 0 when nobody tells.

    keys: device -> key of its lock, empty on the CPU.
    """
    if keys:
        by_uuid = {gpu.uuid: gpu.free for gpu in gpus if gpu.uuid}
        return sum(by_uuid.get(key, 0) for key in set(keys.values()))
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def concurrent_requests(keys: Mapping[str, str], gpus: Sequence[Gpu]) -> int:
    """Default of `max_concurrent_requests`: what the smallest GPU of a plan can serve at once.

    keys: device -> key of its lock, empty on the CPU. A GPU of unknown size counts as a small one.
    """
    total = {gpu.uuid: gpu.total for gpu in gpus if gpu.uuid}
    smallest = min((total.get(key, 0) for key in keys.values()), default=0)
    return next((count for size, count in CONCURRENCY if smallest >= size), FEW_REQUESTS)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").split()
        import pwd

        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return ""
    return f" ({' '.join(words)[:60]}, user {user})"


def weights_bytes(folder: Path | None, quantization: str) -> int:
    """Least bytes that the safetensors files of a folder take on devices; 0 without any. Reads their headers alone."""
    if folder is None or not folder.is_dir():
        return 0
    least = ELEMENT_BYTES.get(quantization, 2)
    return sum(_file_bytes(path, least) for path in folder.rglob("*.safetensors"))


def _file_bytes(path: Path, least: int) -> int:
    with suppress(OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size <= HEADER_LIMIT else {}
        return sum(_tensor_bytes(facts, least) for name, facts in header.items() if name != "__metadata__")
    return 0  # a damaged file is named by the process that reads the weights


def _tensor_bytes(facts: Mapping[str, object], least: int) -> int:
    count = 1
    shape = facts["shape"]
    for side in shape if isinstance(shape, list) else ():
        count *= int(side)
    return count * min(least, _DISK_BYTES.get(str(facts["dtype"]), 1))
