"""One JSON line per finished request: the summary of its trace. Written by the supervisor for `up --log-stats`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Final

from mstar_core.observe.request_log import RequestRecord

FILE: Final = "stats.ndjson"
LIMIT_BYTES: Final = 200 << 20
"""Turned over once at this size, as logs are."""

log = logging.getLogger(__name__)


class StatsLog:
    """Appends to a file for the owner alone. Owned by the supervisor's process; a full disk costs lines, nothing else.

    `ended` is called by the request log, once the last spans of a request have come.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self._model = model

    def ended(self, known: RequestRecord) -> None:
        """Write one request: its facts, and sums of its spans by process, node, walk and kind."""
        trace = known.trace(self._model, known.api.ended or known.seen)
        line = {**trace["request"], "sums": trace["sums"]}
        try:
            if self.path.exists() and self.path.stat().st_size > LIMIT_BYTES:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            with open(self.path, "a", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            log.warning("a line of the statistics was lost: %s: %s", self.path, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
