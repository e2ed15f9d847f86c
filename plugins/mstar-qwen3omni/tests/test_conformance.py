"""The checks of `mstarctl plugins check qwen3_omni`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestQwen3Omni(ModelConformance):
    plugin, model = "qwen3_omni", "qwen3_omni"
