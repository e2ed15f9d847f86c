"""The checks of `mstarctl plugins check pi05`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestPi05(ModelConformance):
    plugin, model = "pi05", "pi05"
