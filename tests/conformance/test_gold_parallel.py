"""Gold with tensor parallelism: two ranks that compute nodes together answer as the reference does."""

from __future__ import annotations

import pytest
from torch import Tensor

from mstar_core.conformance.two_ranks import ThreadCollectives
from mstar_core.plugin.conformance import CHECKS, CheckResult, Subject, run_check
from mstar_core.plugin.loader import PluginEntry
from tests.families.families import SPECS

pytest.importorskip("transformers")
CHECK = next(check for check in CHECKS if check.name == "reference-parallel")
ENTRY = PluginEntry(name="llm", target="mstar_llm.plugin", distribution="mstar-llm", version="0.1.0")


def run(name: str) -> CheckResult:
    spec = SPECS[name]
    return run_check(CHECK, Subject(entry=ENTRY, models=(spec,), spec=spec))


def test_a_model_on_two_ranks_answers_as_its_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("llm").outcome == "passed"

    def forgets_the_others(collectives: ThreadCollectives, value: Tensor) -> Tensor:
        return value

    monkeypatch.setattr(ThreadCollectives, "all_reduce", forgets_the_others)
    result = run("llm")
    assert (result.outcome, "with LLM on two ranks" in result.detail) == ("failed", True)
