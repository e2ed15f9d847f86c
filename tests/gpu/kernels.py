"""Which Triton kernels a package has, and which of them have run in this process. Used by the kernel tests."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def launched(*packages: str) -> dict[str, bool]:
    """Every kernel below the packages by `module:name`, and whether it was launched.

    A kernel is what triton compiles and whose name ends in `kernel`; the others are functions that kernels call.
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
    """Whether some device holds a compiled form of it."""
    return any(cache[0] for cache in kernel.device_caches.values())


def modules(package: str) -> list[ModuleType]:
    """A package's modules, itself included."""
    top = importlib.import_module(package)
    names = [found.name for found in pkgutil.walk_packages(getattr(top, "__path__", []), f"{package}.")]
    return [top, *(importlib.import_module(name) for name in names)]
