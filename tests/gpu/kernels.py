"""Triton kernels of a package, and whether they have run in this process. Used by the kernel tests."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def launched(*packages: str) -> dict[str, bool]:
    """Return every kernel of the packages as `module:name`, and whether it was launched.

    Kernels are JIT functions whose names end in `kernel`; other JIT functions are called by kernels.
    """
    from triton.runtime.jit import JITFunction

    found = {}
    for package in packages:
        for module in modules(package):
            for name, value in vars(module).items():
                is_own = isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
                if is_own and name.endswith("kernel"):
                    found[f"{module.__name__}:{name}"] = has_run(value)
    return found


def has_run(kernel: Any) -> bool:
    """Return whether a device has a compiled version of the kernel."""
    return any(cache[0] for cache in kernel.device_caches.values())


def modules(package: str) -> list[ModuleType]:
    """Return the modules of a package, itself included."""
    top = importlib.import_module(package)
    names = [found.name for found in pkgutil.walk_packages(getattr(top, "__path__", []), f"{package}.")]
    return [top, *(importlib.import_module(name) for name in names)]
