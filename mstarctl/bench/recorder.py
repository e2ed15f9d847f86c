"""Records of a run: light decoding while it runs, checks and `requests.jsonl` after it.

Raw records wait in a spool file, so that checks cost no timing. Beyond its limit they are checked at once, so that
neither memory nor disk grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from mstarctl.bench.client.wire import HEAD, Record
from mstarctl.bench.load.plan import MEASURED, RunPlan
from mstarctl.bench.measure.outcome import Outcome, outcome_of
from mstarctl.bench.measure.tokens import TokenCounter

SPOOL_BYTES: Final = 2 << 30
LINES: Final = "requests.jsonl"


class RunRecorder:
    """Collects the records of one run. Owned by the run. starts: monotonic nanoseconds of each phase."""

    def __init__(
        self,
        folder: Path,
        plan: RunPlan,
        warm_up: int,
        *,
        is_checked: bool,
        limit: int = SPOOL_BYTES,
        count_tokens: TokenCounter | None = None,
    ) -> None:
        self.starts: dict[int, int] = {}
        self._plan = plan
        self._warm_up = warm_up
        self._is_checked = is_checked
        self._count_tokens = count_tokens
        self._limit = limit
        self._spool_path = folder / "records.spool"
        self._spool: IO[bytes] = self._spool_path.open("wb")
        self._lines: IO[bytes] = (folder / LINES).open("wb")
        self._size = 0

    def add(self, record: Record, raw: bytes) -> Outcome:
        """Keep a record and return its outcome, without checks."""
        if self._size + len(raw) > self._limit:
            outcome = self._outcome(record, is_final=True)
            self._write(outcome)
            return outcome
        self._spool.write(HEAD.pack(len(raw)) + raw)
        self._size += len(raw)
        return self._outcome(record, is_final=False)

    def _outcome(self, record: Record, *, is_final: bool) -> Outcome:
        # Bodies of a closed loop repeat, so an index may appear several times.
        asked = self._plan.asked[record.index]
        start = self.starts[record.phase]
        return outcome_of(
            record,
            asked,
            start,
            self._plan.prefix,
            self._warm_up,
            is_checked=is_final and self._is_checked,
            count_tokens=self._count_tokens if is_final else None,
        )

    def _write(self, outcome: Outcome) -> None:
        if outcome.phase == MEASURED:
            self._lines.write(msgspec.json.encode(outcome) + b"\n")

    def finish(self, keep: Callable[[Outcome, bytes], None] | None = None) -> None:
        """Check the spooled records, write their lines, and delete the spool. keep: receives each body."""
        self._spool.close()
        for record in self._spooled():
            outcome = self._outcome(record, is_final=True)
            self._write(outcome)
            if keep is not None and outcome.phase == MEASURED:
                keep(outcome, record.body)
        self._lines.close()
        self._spool_path.unlink()

    def _spooled(self) -> Iterator[Record]:
        decoder = msgspec.msgpack.Decoder(Record)
        with self._spool_path.open("rb") as file:
            while head := file.read(HEAD.size):
                yield decoder.decode(file.read(HEAD.unpack(head)[0]))

    def close(self) -> None:
        """Close the files without checks, after an error."""
        self._spool.close()
        self._lines.close()
