"""ModelConformance: subclass it in a plugin's tests and name the plugin and the model."""

from __future__ import annotations

from typing import ClassVar

import pytest

from mstar_core.plugin.conformance import CHECKS, ConformanceCheck, Subject, run_check
from mstar_core.plugin.loader import find_entry, load_plugin


class ModelConformance:
    """Runs every conformance check on one model of an installed plugin; what cannot be checked here is skipped by name.

    class TestFoo(ModelConformance):
        plugin, model = "foo", "foo"
    """

    plugin: ClassVar[str]
    model: ClassVar[str]

    @pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
    def test_conforms(self, check: ConformanceCheck) -> None:
        result = run_check(check, self.subject(check))
        if result.outcome == "skipped":
            pytest.skip(f"runs when its need is met: {result.detail}")
        assert result.outcome == "passed", f"{check.doc}: {result.detail}"

    def subject(self, check: ConformanceCheck) -> Subject:
        """The plugin, and the model for checks of a model."""
        entry = find_entry(self.plugin)
        models = load_plugin(entry.name)
        spec = next((spec for spec in models if spec.name == self.model), None)
        assert spec is not None, (
            f"plugin {self.plugin} offers no model {self.model}; it offers {[s.name for s in models]}"
        )
        return Subject(entry=entry, models=models, spec=spec if check.is_per_model else None)
