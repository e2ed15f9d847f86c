"""Fixtures: the spec of the toy plugin, and resolution of a text against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mstar_core.config.files.load import read_text
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.plugin import ModelSpec
from mstarctl.plugins import Plugins
from mstarctl.start.target import parse_set, resolve_with
from tests.plugin.toy import entries, install

Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plugins:
    install(monkeypatch, tmp_path)
    return Plugins.discover(entries("toy"), {})


@pytest.fixture
def spec(plugins: Plugins) -> ModelSpec:
    return plugins.model("toy")


@pytest.fixture
def resolved(spec: ModelSpec) -> Resolve:
    """Resolve the text of a file called `toy.yaml`, with `--set` overrides."""

    def run(text: str, *sets: str) -> ResolvedConfig:
        return resolve_with(spec, read_text(text, "toy.yaml"), [parse_set(item) for item in sets])

    return run
