"""Modules that a fresh process loads. The import contracts see only static imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "numpy", "textual", "sanic", "flashinfer", "openai", "pydantic")
PLUGIN_MODULES = sorted(path.name for path in ROOT.glob("plugins/*/src/mstar_*") if (path / "plugin.py").is_file())
LIGHT = (
    "mstar_core.errors",
    "mstar_core.families",
    "mstar_core.graph",
    "mstar_core.plugin",
    "mstar_core.value_spec",
    "mstar_core.version",
)


@pytest.mark.parametrize(
    "argv", [("--help",), ("--version",), ("plugins", "ls"), ("ps",), ("context", "ls")], ids=" ".join
)
def test_everyday_commands_stay_light(argv: tuple[str, ...], fresh_mstarctl: Callable[..., Any]) -> None:
    """These commands must start fast; torch alone takes more than a second to import."""
    fresh = fresh_mstarctl(*argv)
    assert fresh.code == 0, fresh.stderr
    assert fresh.loaded(HEAVY) == set()


@pytest.mark.parametrize("package", PLUGIN_MODULES)
def test_a_light_module_loads_only_the_standard_library_and_the_light_packages(
    package: str, fresh_python: Callable[[str], Any]
) -> None:
    """One heavy plugin slows every command that lists models. Plugins load pluggy for the hook marker."""
    fresh = fresh_python(f"import {package}.plugin")
    strangers = fresh.tops() - {*sys.stdlib_module_names, "mstar_core", "pluggy", package}
    assert {name for name in strangers if not name.startswith("_")} == set()
    ours = {module for module in fresh.modules if module.startswith("mstar_core.")}
    assert {module for module in ours if not is_light(module)} == set()


@pytest.mark.parametrize(
    "package", [f"mstar_core.{name}" for name in ("client", "config", "graph", "messages", "observe", "plugin")]
)
def test_a_light_package_of_the_core_loads_without_torch(package: str, fresh_python: Callable[[str], Any]) -> None:
    """Models are listed, planned and drawn without torch installed."""
    assert fresh_python(f"import {package}").loaded(("torch", "transformers", "sanic", "textual")) == set()


@pytest.mark.parametrize("process", ["agent.main", "conductor.main", "supervisor.main", "weights.fetch"])
def test_a_process_without_tensors_loads_no_numpy(process: str, fresh_python: Callable[[str], Any]) -> None:
    """numpy takes a fifth of the import time of such a process, and memory in each."""
    assert fresh_python(f"import mstar_core.{process}").loaded(("numpy", "torch", "transformers", "textual")) == set()


def is_light(module: str) -> bool:
    """Return whether a module belongs to a package that a light module may load."""
    return any(module == name or module.startswith(f"{name}.") for name in LIGHT)


def test_the_guard_sees_a_heavy_import(fresh_python: Callable[[str], Any]) -> None:
    assert fresh_python("import numpy").loaded(HEAVY) == {"numpy"}
