"""A processor that takes its time to be made, as one that loads a large tokenizer does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.fakes import speech_model

START_S: Final = 2.0


class Processor(speech_model.Processor):
    """Works as the one of the speech model, once it is there."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        time.sleep(START_S)
        super().__init__(folder, model_kwargs)
