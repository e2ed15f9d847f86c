"""`mstarctl doctor`: checks whether this host, or those of a Ray cluster, can run deployments. It changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import ExitCode, MstarError
from mstar_core.host.gpu_locks import gpu_holder, lock_folder
from mstar_core.host.hardware.gpus import gpu_names
from mstar_core.host.hardware.memory import memory_facts
from mstar_core.host.ports import bind_error
from mstar_core.host.run_dir import deployments, runtime_root
from mstarctl.client.log_dirs import state_root
from mstarctl.commands.doctor_gpu import gpu_findings
from mstarctl.commands.doctor_ray import ray_findings
from mstarctl.commands.finding import FAILED, NA, OK, WARN, Finding
from mstarctl.commands.hosts import RayAddress
from mstarctl.output import Column, Printer, size_text
from mstarctl.output.units import counted
from mstarctl.plugins import Plugins
from mstarctl.start.hardware.devices import torch_version

COLUMNS = (Column("CHECK", "name"), Column("STATE", "state"), Column("DETAIL", "detail"))
LEAST_PYTHON: Final = (3, 11)
LITTLE_MEMORY: Final = 4 << 30
LITTLE_SHM: Final = 256 << 20
LITTLE_DISK: Final = 2 << 30
USUAL_PORT: Final = 8000


def doctor(ctx: typer.Context, ray: RayAddress = None) -> None:
    """Check this host, or those of a Ray cluster: versions, devices, memory, folders, ports, plugins."""
    printer = Printer.of(ctx)
    results = list(findings() if ray is None else ray_findings(ray))
    items = [{"name": f.name, "state": f.state, "detail": f.detail} for f in results]
    printer.items("finding", items, COLUMNS)
    if any(finding.state == FAILED for finding in results):
        raise typer.Exit(ExitCode.INVALID)


def findings() -> Iterator[Finding]:
    """Run every check in order."""
    for check in CHECKS:
        yield from check()


def _python() -> Iterator[Finding]:
    is_new = sys.version_info >= LEAST_PYTHON
    yield Finding(
        name="python", state=OK if is_new else FAILED, detail=f"{platform.python_version()} ({sys.executable})"
    )
    system = platform.system()
    yield Finding(
        name="system",
        state=OK if system == "Linux" else FAILED,
        detail=f"{system} {platform.release()}, {counted(os.cpu_count() or 1, 'core')}",
    )


def _torch() -> Iterator[Finding]:
    version = torch_version()
    if version is None:
        yield Finding(name="torch", state=FAILED, detail="not installed; pip install 'mstarctl[runtime]'")
        return
    yield Finding(
        name="torch", state=OK, detail=f"{version}{' (built without CUDA)' if version.endswith('+cpu') else ''}"
    )


def _gpus() -> Iterator[Finding]:
    names = gpu_names()
    version = torch_version() or ""
    if not names:
        yield Finding(name="gpu", state=NA, detail="none found; ranks run on the CPU")
        return
    blind = version.endswith("+cpu")
    yield Finding(
        name="gpu",
        state=WARN if blind else OK,
        detail="; ".join(names) + ("; torch is built without CUDA" if blind else ""),
    )


def _sound() -> Iterator[Finding]:
    has = find_spec("soundfile") is not None
    yield Finding(
        name="soundfile",
        state=OK if has else WARN,
        detail="flac, mp3 and opus output" if has else "not installed: only wav and pcm output",
    )


def _memory() -> Iterator[Finding]:
    available = available_memory()
    if available is None:
        yield Finding(name="memory", state=NA, detail="/proc/meminfo cannot be read")
        return
    yield Finding(
        name="memory", state=OK if available >= LITTLE_MEMORY else WARN, detail=f"{size_text(available)} available"
    )


def available_memory() -> int | None:
    """Return the memory for a new process: the kernel's estimate, limited by the control group."""
    estimate = memory_facts().get("MemAvailable")
    limit, used = _number(Path("/sys/fs/cgroup/memory.max")), _number(Path("/sys/fs/cgroup/memory.current"))
    left = None if limit is None or used is None else max(0, limit - used)
    known = [value for value in (estimate, left) if value is not None]
    return min(known) if known else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding(
            name="/dev/shm",
            state=FAILED,
            detail="missing: locks of GPUs are kept there; MSTAR_GPU_LOCK_DIR names another folder",
        )
        return
    free = shutil.disk_usage(path).free
    left = len([folder for folder in path.glob("mstar*") if folder != lock_folder()])
    detail = f"{size_text(free)} free" + (f"; {counted(left, 'file')} named mstar*" if left else "")
    yield Finding(name="/dev/shm", state=OK if free >= LITTLE_SHM else WARN, detail=detail)


def _folders() -> Iterator[Finding]:
    for name, path in (("run directory", runtime_root()), ("log folder", state_root())):
        base = next(part for part in (path, *path.parents) if part.exists())
        if not os.access(base, os.W_OK):
            yield Finding(name=name, state=FAILED, detail=f"{path}: {base} cannot be written")
            continue
        free = shutil.disk_usage(base).free
        yield Finding(name=name, state=OK if free >= LITTLE_DISK else WARN, detail=f"{path}, {size_text(free)} free")
    if not os.environ.get("XDG_RUNTIME_DIR") and not os.environ.get("MSTAR_RUNTIME_DIR"):
        yield Finding(name="XDG_RUNTIME_DIR", state=NA, detail=f"not set; {tempfile.gettempdir()} is used")


def _stale() -> Iterator[Finding]:
    runs = list(deployments())
    stale = [run for run in runs if run.holder() is None]
    detail = (
        ", ".join(str(run.path) for run in stale) + "; the next mstarctl up of a name cleans it up"
        if stale
        else f"none; {len(runs)} running"
    )
    yield Finding(name="stale deployments", state=WARN if stale else OK, detail=detail)


def _locks() -> Iterator[Finding]:
    folder = lock_folder()
    held = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        holder = gpu_holder(path.name)
        if holder is not None:
            held.append(f"{path.name}: {holder}")
    yield Finding(name="gpu locks", state=OK if held else NA, detail="; ".join(held) or "no deployment holds a GPU")


def _ports() -> Iterator[Finding]:
    error = bind_error(ApiConfig().host, USUAL_PORT)
    detail = "free" if error is None else f"{error.strerror}: use --port"
    yield Finding(name=f"port {USUAL_PORT}", state=OK if error is None else WARN, detail=detail)


def _plugins() -> Iterator[Finding]:
    try:
        plugins = Plugins.discover()
    except MstarError as error:
        yield Finding(name="plugins", state=FAILED, detail=str(error))
        return
    if not plugins.loaded:
        yield Finding(name="plugins", state=FAILED, detail="none installed; pip install mstar-orpheus")
    for item in plugins.loaded:
        state = {"ok": OK, "disabled": NA}.get(item.state, FAILED)
        yield Finding(name=f"plugin {item.entry.name}", state=state, detail=f"{item.entry.version} {item.text}")
    for check in plugins.doctor():
        state = WARN if check.state == "warning" else check.state
        yield Finding(
            name=check.name, state=state, detail="; ".join(part for part in (check.detail, check.hint) if part)
        )


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _python,
    _torch,
    _gpus,
    gpu_findings,
    _locks,
    _sound,
    _memory,
    _shared_memory,
    _folders,
    _stale,
    _ports,
    _plugins,
)
