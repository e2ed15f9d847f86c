"""What a GPU deployment needs of this host, found without importing torch: driver, memory, packages, compilers.

Read by `mstarctl doctor`. Everything comes from metadata, files of packages, and the driver's library or tool.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SMI_TIMEOUT_S: Final = 15.0
_QUERY: Final = "name,driver_version,memory.free,memory.total,uuid"
_PROCESSES: Final = "gpu_uuid,pid,used_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU now. free, total: bytes. uuid: "" when the driver's tool is too old to tell."""

    name: str
    driver: str
    free: int
    total: int
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with memory on a GPU, as the driver names it. used: bytes."""

    uuid: str
    pid: int
    used: int


def gpus() -> list[Gpu]:
    """The GPUs that the driver reports: by its library when nvidia-ml-py is installed, else by nvidia-smi."""
    found = _by_library()
    return _by_tool() if found is None else found


def _by_library() -> list[Gpu] | None:
    if find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None  # no driver, or one of another version: its tool says which
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        made = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = _text(nvml.nvmlDeviceGetName(handle))
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            made.append(Gpu(name=name, driver=driver, free=int(memory.free), total=int(memory.total), uuid=uuid))
        return made
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _by_tool() -> list[Gpu]:
    return parse_smi(_ask_tool(f"--query-gpu={_QUERY}"))


def gpu_processes() -> list[GpuProcess]:
    """Who holds memory on the GPUs of this host, as far as the driver's tool may tell."""
    return parse_processes(_ask_tool(f"--query-compute-apps={_PROCESSES}"))


def _ask_tool(query: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, query, "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout if said.returncode == 0 else ""


def parse_smi(text: str) -> list[Gpu]:
    """Lines of `nvidia-smi --query-gpu=name,driver_version,memory.free,memory.total,uuid`, memory in MiB."""
    made = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        with suppress(ValueError, IndexError):
            free, total = int(fields[2]) << 20, int(fields[3]) << 20
            uuid = fields[4] if len(fields) > 4 else ""
            made.append(Gpu(name=fields[0], driver=fields[1], free=free, total=total, uuid=uuid))
    return made


def parse_processes(text: str) -> list[GpuProcess]:
    """Lines of `nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory`, memory in MiB; others are left out."""
    made = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        with suppress(ValueError, IndexError):
            made.append(GpuProcess(uuid=fields[0], pid=int(fields[1]), used=int(fields[2]) << 20))
    return made


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built with, "" for none, None when it cannot be told."""
    spec = find_spec("torch")  # finding a top-level package does not import it
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*(?:'([^']*)'|None)", text, re.MULTILINE)
    return None if found is None else found.group(1) or ""


def version_of(distribution: str) -> str | None:
    """The installed version of a package, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def missing_modules(*names: str) -> list[str]:
    """Those of these top-level modules that cannot be found."""
    return [name for name in names if find_spec(name) is None]


def find_tool(name: str) -> str | None:
    """A compiler tool on the path or in a CUDA toolkit."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    folders = [str(Path(home) / "bin") for home in homes]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
