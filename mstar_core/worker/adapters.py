"""LoRA adapters of a rank: read from their folders on a thread, stored in the stacks of its nodes, found by number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.engine.base import NO_ADAPTER
from mstar_core.errors import EngineError, MstarError, WeightsError
from mstar_core.messages.adapters import AdapterDone, LoadAdapter, UnloadAdapter
from mstar_core.weights.adapter import Adapter

if TYPE_CHECKING:
    from mstar_core.config.deployment import AdapterPlan
    from mstar_core.engine.runner import NodeRunner
    from mstar_core.layers.lora import AdapterBank

POLL_S: Final = 0.01
"""Interval at which an idle process looks for adapters that were read."""

log = logging.getLogger(__name__)


def banks_of(runners: Mapping[str, NodeRunner]) -> dict[str, AdapterBank]:
    """Return the banks of the nodes that take adapters, by name."""
    return {name: runner.adapters for name, runner in runners.items() if runner.adapters is not None}


@dataclass(slots=True)
class RankAdapters:
    """The adapters of one rank. Owned by its worker or follower, and used from its thread.

    banks: of the nodes that take adapters, by name.
    """

    banks: Mapping[str, AdapterBank] = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)
    _reading: dict[int, tuple[AdapterPlan, Future[Adapter]]] = field(default_factory=dict)
    _reader: ThreadPoolExecutor | None = None

    def row(self, number: int) -> int:
        """Return the row of an adapter, NO_ADAPTER for the number 0. Raises EngineError if it is not loaded here."""
        if not number:
            return NO_ADAPTER
        if number not in self._rows:
            raise EngineError(
                "the LoRA adapter of this request is not loaded", hint="load it again: mstarctl lora load"
            )
        return self._rows[number]

    def load_all(self, plans: Iterable[AdapterPlan], *, is_first: bool) -> None:
        """Load the adapters of the start. Raises WeightsError, or logs it in a process that was started again.

        Without its adapter a request fails by name; a process that cannot start would fail all of them.
        """
        for plan in plans:
            try:
                self._store(plan, Adapter.read(Path(plan.folder)))
            except WeightsError as error:
                if is_first:
                    raise
                log.error("adapter %s is not loaded again: %s: %s", plan.name, error.title, error.detail)

    # -- while the process serves ------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read."""
        return bool(self._reading)

    def begin(self, message: LoadAdapter) -> None:
        """Begin to read an adapter; steps go on meanwhile."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        plan = message.adapter
        self._reading[plan.number] = plan, self._reader.submit(Adapter.read, Path(plan.folder))

    def finish(self, answer: Callable[[AdapterDone], object]) -> int:
        """Store the adapters that were read, and answer. Returns their number."""
        ready = [number for number, (_, reading) in self._reading.items() if reading.done()]
        for number in ready:
            plan, reading = self._reading.pop(number)
            started = time.monotonic()
            try:
                self._store(plan, reading.result())
            except MstarError as error:
                answer(AdapterDone(number=number, title=error.title, detail=error.detail, hint=error.hint))
            except Exception as error:  # isolation boundary: one adapter
                log.exception("adapter %s cannot be loaded", plan.name)
                answer(
                    AdapterDone(number=number, title=f"the adapter cannot be loaded: {type(error).__name__}: {error}")
                )
            else:
                log.info("adapter %s loaded into row %d in %.3f s", plan.name, plan.row, time.monotonic() - started)
                answer(AdapterDone(number=number))
        return len(ready)

    def unload(self, message: UnloadAdapter, answer: Callable[[AdapterDone], object]) -> None:
        """Drop an adapter, which no request uses any more."""
        if message.number in self._rows:
            row = self._rows.pop(message.number)
            for bank in self.banks.values():
                bank.clear(row)
        answer(AdapterDone(number=message.number))

    def close(self) -> None:
        """End the thread that reads."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _store(self, plan: AdapterPlan, adapter: Adapter) -> None:
        if not self.banks:
            self._rows[plan.number] = plan.row
            return
        for bank in self.banks.values():
            bank.check(adapter)
        for bank in self.banks.values():
            bank.load(plan.row, adapter)
        self._rows[plan.number] = plan.row
