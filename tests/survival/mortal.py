"""Deployment of a miniature whose processes die at chosen messages, as often as a test wishes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.runtime.deployment import Deployment
from tests.survival.families import Family
from tests.survival.strikes import Strikes

HOOK: Final = Path(__file__).with_name("hook")


class Mortal(Deployment):
    """One miniature on the CPU. family: its requests. strikes: its kills."""

    def __init__(self, family: Family, **changes: Any) -> None:
        usual: dict[str, Any] = {"weights_source": family.weights, "where": family.where}
        super().__init__(served=family.served, name=family.name, **{**usual, **changes})
        self.family = family
        self.strikes = Strikes(self.root)

    def start(
        self, *, makes_directory: bool = True, entry: Sequence[str] = ("-m", "tests.survival.supervisor")
    ) -> None:
        super().start(makes_directory=makes_directory, entry=entry)

    def environment(self) -> dict[str, str]:
        usual = super().environment()
        return {**usual, "PYTHONPATH": os.pathsep.join([str(HOOK), usual["PYTHONPATH"]])}
