"""Statistics log of `up --log-stats`: one JSON line per finished request, the summary of its trace."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Final

from mstar_core.observe.request_log import RequestRecord

STATS_FILE: Final = "stats.ndjson"
LIMIT_BYTES: Final = 200 << 20
"""Size at which the file is rotated once, as logs are."""

log = logging.getLogger(__name__)


class StatsLog:
    """Appends to a file that only its owner can read. Owned by the supervisor; a full disk loses lines, nothing else.

    The request log calls `ended` once the last spans of a request have arrived.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self._model = model

    def ended(self, record: RequestRecord) -> None:
        """Write one request: its facts, and the sums of its spans by process, node, walk and kind."""
        trace = record.trace(self._model, record.api.ended or record.seen)
        line = {**trace["request"], "sums": trace["sums"]}
        try:
            if self.path.exists() and self.path.stat().st_size > LIMIT_BYTES:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            with open(self.path, "a", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            log.warning("a line of the statistics log was lost: %s: %s", self.path, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
