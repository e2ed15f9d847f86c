"""The checks of `mstarctl plugins check wan22`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestWan22(ModelConformance):
    plugin, model = "wan22", "wan22"


class TestExperts(ModelConformance):
    plugin, model = "wan22", "wan22_a14b"


class TestAnimatingExperts(ModelConformance):
    plugin, model = "wan22", "wan22_i2v_a14b"
