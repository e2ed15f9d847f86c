"""The checks of `mstarctl plugins check bagel`, as tests."""

from __future__ import annotations

import pytest

from mstar_core.plugin.conformance import CHECKS, ConformanceCheck
from mstar_core.plugin.testing import ModelConformance


class TestBagel(ModelConformance):
    plugin, model = "bagel", "bagel"


class TestBagelCfgParallel(ModelConformance):
    """The same model with another placement: its miniature would only repeat the checks of `bagel`."""

    plugin, model = "bagel", "bagel_cfg_parallel"

    @pytest.mark.parametrize(
        "check", [check for check in CHECKS if check.target.startswith("mstar_core.conformance.light")]
    )
    def test_conforms(self, check: ConformanceCheck) -> None:
        super().test_conforms(check)
