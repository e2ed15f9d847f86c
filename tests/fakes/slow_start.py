"""Processor that starts only while a gate is open, for starts of controlled length."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.fakes import speech_model

LOOK_S: Final = 0.01


class Processor(speech_model.Processor):
    """The speech model's processor behind a gate. model_kwargs: `gate`, a file; the gate is open while it exists."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        while not Path(model_kwargs["gate"]).exists():
            time.sleep(LOOK_S)
        super().__init__(folder, model_kwargs)
