"""The checks of `mstarctl plugins check bagel`, as tests."""

from __future__ import annotations

from mstar_core.plugin.testing import ModelConformance


class TestBagel(ModelConformance):
    plugin, model = "bagel", "bagel"


class TestBagelCfgParallel(ModelConformance):
    plugin, model = "bagel", "bagel_cfg_parallel"
