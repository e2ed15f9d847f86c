"""The checks of `mstarctl plugins check bagel`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestBagel(ModelConformance):
    plugin, model = "bagel", "bagel"
