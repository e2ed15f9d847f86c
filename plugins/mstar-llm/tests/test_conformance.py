"""The checks of `mstarctl plugins check llm`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestLlm(ModelConformance):
    plugin, model = "llm", "llm"
