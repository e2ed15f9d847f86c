"""docs/http-api.md names every route, limit, metric and error code that clients can encounter."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

import mstar_core.api
from mstar_core import errors
from mstar_core.api.route_table import ROUTES, shown_path
from mstar_core.api.routes.deployment import ENDPOINTS
from mstar_core.sound_files import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()

NEVER_SEEN = {
    "usage",
    "refused",
    "conflict",
    "invalid_config",
    "invalid_graph",
    "start_failed",
    "unreachable",
    "weights",
    "transport",
    "peer_stalled",
}
"""Codes of errors that end a command or a process, or that clients see as `internal_error`."""


def codes_of_the_api() -> set[str]:
    """Return the codes written in the api's source, and those of the error classes."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(mstar_core.api.__path__, "mstar_core.api."):
        if not module.name.endswith("__main__"):
            found |= set(re.findall(r'code="([a-z_]+)"', inspect.getsource(import_module(module.name))))
            found |= set(re.findall(r'^    code = "([a-z_]+)"', inspect.getsource(import_module(module.name)), re.M))
    found |= {
        kind.code for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.MstarError)
    }
    return found - NEVER_SEEN


@pytest.mark.parametrize("code", sorted(codes_of_the_api()))
def test_every_error_code_is_on_the_page(code: str) -> None:
    assert f"`{code}`" in PAGE


def test_every_route_is_on_the_page() -> None:
    for path in [*(route.path for route in ROUTES), *ENDPOINTS.values()]:
        assert shown_path(path).replace("{name}", "{id}") in PAGE


def test_every_format_is_on_the_page() -> None:
    for name in FORMATS:
        assert f"`{name}`" in PAGE
