"""Cases of the golden set."""

from __future__ import annotations

import pytest

from .golden_set import CASES, Case


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each case of the set."""
    return Case(str(request.param))
