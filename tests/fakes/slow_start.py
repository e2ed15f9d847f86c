"""A processor that is made only while a gate is open: a start that lasts as long as a test wants."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.fakes import speech_model

LOOK_S: Final = 0.01


class Processor(speech_model.Processor):
    """Works as the one of the speech model, once it is there. model_kwargs: `gate`, a file; open while it exists."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        while not Path(model_kwargs["gate"]).exists():
            time.sleep(LOOK_S)
        super().__init__(folder, model_kwargs)
