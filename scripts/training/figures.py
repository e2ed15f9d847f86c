"""Figures of a training: the last lines of the logs of its stages, as train.json keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_figures(folder: Path, parameters: int, stages: dict[str, Any]) -> None:
    """Write train.json: the number of trained parameters, and the figures of the stages."""
    text = json.dumps({"parameters": parameters, **stages}, indent=1) + "\n"
    (folder / "train.json").write_text(text, encoding="utf-8")


def last_figures(out: Path, stages: Iterable[str]) -> dict[str, Any]:
    """Return the last line of each stage's log, OUT/STAGE.jsonl."""
    return {
        stage: json.loads((out / f"{stage}.jsonl").read_text(encoding="utf-8").splitlines()[-1]) for stage in stages
    }
