"""The checks of `mstarctl plugins check orpheus`, as tests."""

from __future__ import annotations

from typing import Any

from mstar_core.plugin.testing import ModelConformance
from mstar_orpheus.published import lm_names, snac_names


class TestOrpheus(ModelConformance):
    plugin, model = "orpheus", "orpheus"


def test_the_published_names_are_those_of_the_official_indexes(golden: Any) -> None:
    listed = golden.json("full_size_keys.json")
    assert sorted(lm_names()) == sorted(listed["llm"])
    assert sorted(snac_names()) == sorted(listed["snac"])
