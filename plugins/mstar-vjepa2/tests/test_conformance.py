"""The checks of `mstarctl plugins check vjepa2`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestVjepa2(ModelConformance):
    plugin, model = "vjepa2", "vjepa2"


class TestVjepa2Ac(ModelConformance):
    plugin, model = "vjepa2", "vjepa2_ac"
