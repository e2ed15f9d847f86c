"""GPU checks of `mstarctl doctor`. A failed check names the package and the command that installs it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mstar_core.errors import MstarError, TransportError
from mstar_core.host.hardware.gpus import Gpu, gpus
from mstar_core.host.network import adapters, transfer_engine
from mstarctl.commands.finding import FAILED, NA, OK, WARN, Finding
from mstarctl.output import size_text
from mstarctl.plugins import Plugins
from mstarctl.start.kernels import AOT_DIR, is_prebuilt, kernel_names, prebuilt_folder

LITTLE_MEMORY: Final = 4 << 30
UNUSED: Final = "; unused without a GPU"
FIXES: Final = {
    "nvcc": "apt-get install cuda-nvcc-13-0 cuda-cudart-dev-13-0, or set CUDA_HOME",
    "ninja": "pip install ninja",
    "cc": "apt-get install gcc",
}
"""Command that installs each tool."""

LIBRARIES: Final = ("flashinfer", "tvm_ffi")
"""Packages that load the attention kernels."""


def gpu_findings(present: list[Gpu] | None = None) -> Iterator[Finding]:
    """Run every check; none can fail without a GPU. present: the GPUs; None: those of the driver."""
    devices = gpus() if present is None else present
    yield from _memory(devices)
    yield _torch(devices)
    yield _triton(devices)
    yield _flashinfer(devices)
    missing = list(missing_kernels())
    yield _prebuilt(devices, missing)
    yield from _tools(devices, missing)
    yield _mooncake()
    yield _adapters()


def _memory(devices: list[Gpu]) -> Iterator[Finding]:
    if not devices:
        yield Finding(name="gpu driver", state=NA, detail="no driver found; ranks run on the CPU")
    else:
        yield Finding(name="gpu driver", state=OK, detail=devices[0].driver)
    for index, gpu in enumerate(devices):
        state = OK if gpu.free >= LITTLE_MEMORY else WARN
        detail = f"{gpu.name}: {size_text(gpu.free)} of {size_text(gpu.total)} free"
        yield Finding(name=f"gpu {index} memory", state=state, detail=detail)


def _torch(devices: list[Gpu]) -> Finding:
    cuda = torch_cuda()
    if cuda:
        return Finding(name="torch cuda", state=OK, detail=f"built with CUDA {cuda}" + ("" if devices else UNUSED))
    detail = "torch is built without CUDA" if cuda == "" else "torch is not installed"
    fix = "; pip install torch from https://download.pytorch.org/whl/cu130" if devices else ""
    return Finding(name="torch cuda", state=FAILED if devices else NA, detail=detail + fix)


def _triton(devices: list[Gpu]) -> Finding:
    version = version_of("triton")
    if version is None:
        fix = "; it comes with a CUDA build of torch: pip install triton" if devices else UNUSED
        return Finding(name="triton", state=FAILED if devices else NA, detail=f"not installed{fix}")
    return Finding(name="triton", state=OK if devices else NA, detail=version + ("" if devices else UNUSED))


def _flashinfer(devices: list[Gpu]) -> Finding:
    version, missing = version_of("flashinfer-python"), missing_modules(*LIBRARIES)
    if not devices:
        return Finding(name="flashinfer", state=NA, detail=(version or "not installed") + UNUSED)
    if version is None or "flashinfer" in missing:
        detail = "not installed: pip install 'mstarctl[cuda]', or set attention: torch"
        return Finding(name="flashinfer", state=FAILED, detail=detail)
    if missing:
        detail = f"{version}, without {', '.join(missing)}: pip install apache-tvm-ffi"
        return Finding(name="flashinfer", state=FAILED, detail=detail)
    return Finding(name="flashinfer", state=OK, detail=version)


def missing_kernels(plugins: Plugins | None = None) -> Iterator[str]:
    """Yield the attention kernels of installed models that are not prebuilt."""
    folder = prebuilt_folder()
    for dim in sorted(_head_dims(plugins)):
        yield from (name for name in kernel_names(dim) if not is_prebuilt(folder, name))


def _head_dims(plugins: Plugins | None) -> set[int]:
    """Return the head sizes of every installed model that has code in this version."""
    try:
        models = (plugins or Plugins.discover()).models()
    except MstarError:
        return set()  # the check of the plugins reports it
    specs = [model for model in models if model.model is not None]
    return {node.kv.head_dim for spec in specs for node in spec.nodes if node.kv is not None}


def _prebuilt(devices: list[Gpu], missing: list[str]) -> Finding:
    folder, name = prebuilt_folder(), "prebuilt kernels"
    where = f"{AOT_DIR} is not set" if folder is None else str(folder)
    if not missing:
        return Finding(name=name, state=OK if devices else NA, detail=f"all in {where}" + ("" if devices else UNUSED))
    if not devices:
        return Finding(name=name, state=NA, detail=f"{where}: {len(missing)} missing{UNUSED}")
    detail = f"{where}: missing {', '.join(missing)}"
    lacking = [tool for tool in ("nvcc", "ninja") if find_tool(tool) is None]
    if lacking:
        detail += f"; and {' and '.join(lacking)} to build them here: make kernels where nvcc is, then set {AOT_DIR}"
        return Finding(name=name, state=FAILED, detail=detail)
    return Finding(name=name, state=WARN, detail=f"{detail}; the first start builds them, which takes minutes")


def _tools(devices: list[Gpu], missing: list[str]) -> Iterator[Finding]:
    """Check compilers: cc builds Triton's launchers, nvcc and ninja build kernels that are not prebuilt."""
    for tool in ("cc", "nvcc", "ninja"):
        path = find_tool(tool) or (find_tool("gcc") or find_tool("clang") if tool == "cc" else None)
        needed = bool(devices) and (tool == "cc" or bool(missing))
        if path is not None:
            yield Finding(name=tool, state=OK, detail=path)
        else:
            detail = f"missing: {FIXES[tool]}" if needed else "missing; not needed here"
            yield Finding(name=tool, state=FAILED if needed else NA, detail=detail)


VARIANTS: Final = ("-non-cuda", "", "-cuda13")
"""Ends of the names of Mooncake's distributions, which install the same package."""


def _mooncake() -> Finding:
    """Check the library of the transports TCP and RDMA, which are optional."""
    version = next(filter(None, (version_of(f"mooncake-transfer-engine{variant}") for variant in VARIANTS)), None)
    if version is None:
        return Finding(name="mooncake", state=NA, detail="not installed: pip install 'mstarctl[mooncake]'")
    try:
        transfer_engine()
    except TransportError as error:
        return Finding(name="mooncake", state=WARN, detail=f"{version}: {error.detail}; {error.hint}")
    return Finding(name="mooncake", state=OK, detail=version)


def _adapters() -> Finding:
    names = adapters()
    return Finding(name="rdma", state=OK if names else NA, detail=", ".join(names) or "no adapter")


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch, "" for a build without CUDA, None if unknown."""
    spec = find_spec("torch")  # finding a top-level package does not import it
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    setting = re.search(r"^cuda\b[^=\n]*=\s*(?:'([^']*)'|None)", text, re.MULTILINE)
    return None if setting is None else setting.group(1) or ""


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def missing_modules(*names: str) -> list[str]:
    """Return the top-level modules that are not installed."""
    return [name for name in names if find_spec(name) is None]


def find_tool(name: str) -> str | None:
    """Return the path of a compiler tool, on PATH or in a CUDA toolkit."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    folders = [str(Path(home) / "bin") for home in homes]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
